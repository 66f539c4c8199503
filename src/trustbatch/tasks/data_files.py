"""Data files: reading rows of JSONL, JSON and Parquet, and fetching them from the hub."""

import gzip
import importlib.util
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, cast

from trustbatch.errors import first_line
from trustbatch.tasks.rows import BadRow, BadRows, Row

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
HUB_TIMEOUT = 10.0
"""seconds to wait for the hub"""
_SHARD = re.compile(r"-\d+-of-(\d+)")
"""in the name of a file that is one of several"""


def is_data_file(name: str) -> bool:
    """Whether `read_rows` supports a file of this name."""
    return name.endswith(ENDINGS)


def read_rows(path: str, bad: BadRows | None = None) -> Iterator[Row]:
    """Yield the rows of a file; bad ones are added to `bad`, or else refused."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"task.path = {path!r} is not a file: check the path.")
    if not is_data_file(file.name):
        raise ValueError(
            f"task.path = {path!r} must end in .jsonl, .jsonl.gz, .json (a list) or .parquet."
        )
    refused = BadRows()
    has_good = False
    for where, read in _read_places(file, path):
        try:
            row = read()
        except BadRow as reason:
            (refused if bad is None else bad).add(where, reason)
        else:
            has_good = True
            yield Row(row, where)
    refused.refuse(has_good=has_good)


def _read_places(file: Path, path: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the place of each row, and a function that returns the row or raises BadRow."""
    try:
        if file.suffix == ".parquet":
            for number, row in enumerate(_read_parquet(file), start=1):
                yield f"row {number} of {path!r}", partial(_checked, row)
            return
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8-sig") as lines:
            if file.suffix == ".json":
                for number, row in enumerate(_parse_list(lines.read(), path), start=1):
                    yield f"row {number} of {path!r}", partial(_checked, row)
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number} of {path!r}", partial(_parse_line, line)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"task.path = {path!r} is no text in UTF-8 ({error.reason} at byte {error.start:,}): "
            "save it in UTF-8, or give its real ending."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"task.path = {path!r} can't be read ({first_line(error)}): copy or write it again."
        ) from error


def _parse_line(line: str) -> dict[str, Any]:
    return _checked(_parse(line.strip()))


def _parse(text: str) -> Any:
    """Parse JSON; raises BadRow."""
    try:
        return json.loads(text, object_pairs_hook=_fields)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise BadRow(f"is not JSON ({what} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise BadRow("is nested too deeply") from error
    except BadRow:
        raise
    except ValueError as error:  # such as a number of more digits than Python converts
        raise BadRow(f"can't be read ({first_line(error)})") from error


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"has the field {twice!r} twice", fix="remove one")
    return fields


def _checked(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadRow("is no JSON object with named fields")
    return row


def _parse_list(text: str, path: str) -> list[Any]:
    try:
        rows = _parse(text)
    except BadRow as error:
        raise ValueError(
            f"{path!r} {error}: fix it, or give a file with one JSON object per line the ending "
            ".jsonl."
        ) from error
    if not isinstance(rows, list):
        raise ValueError(f"{path!r} must be a list of JSON objects with named fields.")
    return rows


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet files need pyarrow: pip install 'trustbatch[parquet]'.")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"task.path = {str(file)!r} can't be read ({first_line(error)}): copy or write it "
            "again."
        ) from error


class NotFetchedError(ValueError):
    """The hub could not be reached, or does not have the data."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: give a file with task.path, or go online.")
        self.what = what


@dataclass(frozen=True)
class HubDataset:
    """The files of a data set's splits, e.g. {"train": "main/train-*.parquet"}."""

    repository: str
    files: Mapping[str, str]
    """file pattern of each split, in which a star also matches slashes; the first split is the
    default"""

    @property
    def splits(self) -> list[str]:
        """Names of the splits, the default first."""
        return list(self.files)

    def fetch(self, split: str) -> list[str]:
        """Return the paths of a split's files, downloading only what is not in the cache."""
        # cached files are never updated: data must not change between two starts of a run
        return self._cached(self.files[split]) or self._downloaded(self.files[split])

    def _cached(self, pattern: str) -> list[str]:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(
                snapshot_download(self.repository, repo_type="dataset", local_files_only=True)
            )
        except LocalEntryNotFoundError:
            return []
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        found = _matching(names, pattern)
        return [str(folder / name) for name in found] if _is_complete(found) else []

    def _downloaded(self, pattern: str) -> list[str]:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        # the base classes are errors of the HTTP library, which depends on the client's version
        failures = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
        try:
            listed = HfApi().dataset_info(self.repository, timeout=HUB_TIMEOUT).siblings or []
            return [
                hf_hub_download(
                    self.repository, name, repo_type="dataset", etag_timeout=HUB_TIMEOUT
                )
                for name in _matching([file.rfilename for file in listed], pattern)
            ] or self._refuse_pattern(pattern)
        except failures as error:
            raise NotFetchedError(
                f"The data set {self.repository} could not be fetched from the hub "
                f"({first_line(error)})"
            ) from error

    def _refuse_pattern(self, pattern: str) -> list[str]:
        raise ValueError(
            f"The data set {self.repository} has no files {pattern}: give a file with task.path."
        )


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    return sorted(name for name in names if fnmatch(name, pattern) and is_data_file(name))


def _is_complete(names: list[str]) -> bool:
    """Whether all shards are present, by their names: a download may have been interrupted."""
    numbers = [int(shard.group(1)) for name in names if (shard := _SHARD.search(name))]
    return all(number == len(names) for number in numbers)
