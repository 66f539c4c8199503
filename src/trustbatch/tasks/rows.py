"""Rows of data: what makes one unusable, and where a prompt comes from.

All rows are checked before a run starts. `task.bad_rows` decides whether a bad one is refused with
a sentence or left out and counted.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from trustbatch.types import Prompt

MAX_CHARACTERS = 10_000_000
"""of a prompt: more would not fit any context, and take minutes to tokenize"""
PROMPTS_PER_CALL = 1000
SECONDS_BETWEEN_LINES = 3.0
STOP, LEAVE_OUT = "stop", "leave_out"
"""values of `task.bad_rows`"""


class Row(dict[str, Any]):
    """A row of a file, which knows its place in it."""

    __slots__ = ("where",)

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        super().__init__(fields)
        self.where = where
        """such as "line 3 of 'train.jsonl'\""""


class BadRow(ValueError):
    """Why a row can't be used, as the end of a sentence that starts with its place."""

    def __init__(self, reason: str, *, fix: str = "fix it") -> None:
        super().__init__(reason)
        self.fix = fix


@dataclass
class BadRows:
    """The bad rows of a task: their number, and what to say about the first."""

    count: int = 0
    where: str = ""
    reason: str = ""
    fix: str = ""

    def add(self, where: str, bad: BadRow) -> None:
        """Count a row; the first one is described."""
        if not self.count:
            self.where, self.reason, self.fix = where, str(bad), bad.fix
        self.count += 1

    def refuse(self, *, has_good: bool) -> None:
        """Raise ValueError if there is any; `has_good`: there are other rows."""
        if not self.count:
            return
        others = self.count - 1
        rows = "row" if others == 1 else "rows"
        more = f", and {others:,} more {rows} can't be used" if others else ""
        what = "them" if others else "it"
        # where no row is good, leaving them out is no way
        leave = f', or set task.bad_rows = "{LEAVE_OUT}"' if has_good else ""
        fix = self.fix.replace("fix it", f"fix {what}")
        raise ValueError(
            f"{self.where[:1].upper()}{self.where[1:]} {self.reason}{more}: {fix}{leave}."
        )

    @property
    def left_out(self) -> dict[str, int]:
        """The number by reason, for what a task says of itself."""
        if not self.count:
            return {}
        return {f"bad, such as {self.where}, which {self.reason}": self.count}


def row_id(row: Mapping[str, Any], number: int, column: str = "id") -> str:
    """Return the id of a row, or else its number from 0."""
    return str(number if row.get(column) is None else row[column])


def check_text(what: str, text: str) -> None:
    """Refuse a text that no tokenizer, file or hash can take."""
    if len(text) > MAX_CHARACTERS:
        raise BadRow(f"has a {what} of {len(text):,} characters", fix="shorten it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"has the character {text[error.start]!a} in its {what}, which is half of a pair and "
            "no text",
            fix="replace it",
        ) from error


def check_details(details: Mapping[str, Any]) -> None:
    """Refuse details that a checkpoint could not hold."""
    if not details:
        return
    try:
        json.dumps(details)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"has details that are no plain values ({error})") from error


@dataclass(frozen=True, kw_only=True)
class PromptChecks:
    """What every prompt of a run has to be."""

    count_tokens: Callable[[Sequence[Prompt]], Sequence[int | str]]
    """number of tokens of each prompt, or why it can't be tokenized"""
    context_length: int
    max_tokens: int = 0
    """of a completion, for which the context must have room"""
    task_grades: bool = True
    """whether the task's own grader is part of the reward"""
    needs_answers: bool = False
    """whether another part of the reward compares with the answer"""
    table: str = "rollout"
    """of the configuration, which has max_tokens"""
    say: Callable[[str], None] = field(default=lambda _: None)
    """shows progress"""

    def counted(self, prompts: Sequence[Prompt], name: str) -> Iterator[tuple[Prompt, int | str]]:
        """Yield each prompt with its number of tokens, or why it can't be tokenized."""
        last = time.monotonic()
        for start in range(0, len(prompts), PROMPTS_PER_CALL):
            some = prompts[start : start + PROMPTS_PER_CALL]
            yield from zip(some, self.count_tokens(some), strict=True)
            if time.monotonic() - last > SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.say(f"{name}: {start + len(some):,} of {len(prompts):,} prompts are tokenized")

    def check(self, prompt: Prompt, num_tokens: int | str, *, needs_answer: bool) -> None:
        """Raise BadRow for a prompt that the run could not sample from or grade."""
        if isinstance(num_tokens, str):
            raise BadRow(num_tokens, fix="fix it or choose another model")
        if num_tokens == 0:
            raise BadRow("has a prompt without tokens")
        room = self.context_length - self.max_tokens
        if num_tokens > room:
            key = f"{self.table}.max_tokens"
            after = f", and {key} = {self.max_tokens:,} leaves {room:,}"
            raise BadRow(
                f"has a prompt of {num_tokens:,} tokens, but the model's context has "
                f"{self.context_length:,}{after if self.max_tokens else ''}",
                fix=f"set task.max_prompt_tokens = {room} to leave out longer ones"
                if room > 0 and self.table == "rollout"
                else f"lower {key}",
            )
        if needs_answer and not prompt.answer.strip():
            raise BadRow("has an empty answer, which its grader compares with")


@dataclass(frozen=True)
class RowOrigin:
    """The row of a prompt."""

    where: str
    id: str
    left_out: tuple[str, ...]
    """ids that are left out already"""
    key: str = "task.leave_out"
    """the setting that leaves out rows"""


@runtime_checkable
class RowTask(Protocol):
    """A task of rows, which can be left out by their ids while the others keep their places."""

    @property
    def seats(self) -> Sequence[Prompt]:
        """The problems in the order of the data, with those that are left out by their ids."""
        ...

    def row_of(self, prompt: Prompt) -> RowOrigin | None:
        """Return where a prompt comes from; None if it is not known."""
        ...


def or_leave_out(task: Any, prompt: Prompt) -> str:
    """Return the end of a sentence: how a run goes on without the row of a prompt.

    It is empty for a task that has no rows.
    """
    row = task.row_of(prompt) if isinstance(task, RowTask) else None
    if row is None:
        return ""
    ids = json.dumps([*row.left_out, row.id], ensure_ascii=False)
    return f", or leave out {row.where} with {row.key} = {ids}"
