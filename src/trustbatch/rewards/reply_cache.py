"""Replies of a server on disk, found again by the hash of their request."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

from trustbatch.errors import RewardError

FILE = "replies.sqlite"
WAIT_SECONDS = 30.0
"""for another process that writes to the same file"""
KEYS_PER_QUERY = 500


class ReplyCache:
    """A table of replies, which several processes may use; without a folder it holds nothing."""

    def __init__(self, folder: str | None) -> None:
        self._file = None if folder is None else Path(folder) / FILE
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                # each statement is a transaction of its own
                self._connection = sqlite3.connect(
                    self._file, timeout=WAIT_SECONDS, isolation_level=None
                )
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
                )
            except sqlite3.Error as error:
                self._close()
                raise self._unusable(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def find(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the replies that are there, by key."""
        found: dict[str, str] = {}
        if self._connection is None:
            return found
        wanted = list(keys)
        try:
            for start in range(0, len(wanted), KEYS_PER_QUERY):
                some = wanted[start : start + KEYS_PER_QUERY]
                places = ", ".join("?" * len(some))
                query = f"SELECT key, reply FROM replies WHERE key IN ({places})"
                with closing(self._connection.execute(query, some)) as rows:
                    found.update(rows.fetchall())
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        return found

    def add(self, key: str, reply: str) -> None:
        """Keep a reply; it is on disk when this returns."""
        if self._connection is None:
            return
        try:
            self._connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _unusable(self, error: sqlite3.Error) -> RewardError:
        return RewardError(
            f"{self._file}, which has the replies of a judge, can't be used ({error}): delete it, "
            "or name another folder as judge.cache."
        )
