"""Problems with an answer: the base class of tasks that read data.

A subclass names its data set on the hub, and overrides `standard_row` if the columns have other
names, and `grade` if the answers are not math.
"""

import copy
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

from trustbatch.errors import did_you_mean, first_line
from trustbatch.math_grading.grade import grade_math
from trustbatch.tasks.columns import (
    check_columns,
    column_of,
    number_of,
    read_answer,
    read_problem,
)
from trustbatch.tasks.data_files import read_rows
from trustbatch.tasks.data_source import DataSource
from trustbatch.tasks.filters import excluded, normalized_words
from trustbatch.tasks.hub_data import HubDataset
from trustbatch.tasks.rows import (
    LEAVE_OUT,
    STOP,
    BadRow,
    BadRows,
    PromptChecks,
    RowOrigin,
    check_details,
    check_text,
    row_id,
)
from trustbatch.types import Prompt

Value = TypeVar("Value")
NAMED = "named in task.leave_out"
"""why a row is left out"""
DATA = ("problems", "seats", "_statements", "_places")
"""what a task does not need for grading"""
TEMPLATES = {
    "plain": "{problem}",
    "boxed": (
        "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    ),
}


@dataclass(frozen=True, kw_only=True)
class ProblemTask:
    """Rows of a data set, reshuffled in each epoch by the seed."""

    hub: ClassVar[HubDataset | None] = None
    """the data set that is read if `path` is not set"""
    default_template: ClassVar[str] = "boxed"
    drops_duplicates: ClassVar[bool] = True

    name: str
    seed: int = 0
    path: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    template: str | None = None
    system: str = ""
    thinking: bool | None = None
    columns: Mapping[str, str] | None = None
    extra_columns: tuple[str, ...] = ()
    shuffle: bool = True
    deduplicate: bool | None = None
    difficulty: tuple[float, float] | None = None
    max_prompt_tokens: int | None = None
    exclude: tuple[str, ...] = ()
    bad_rows: str = STOP
    leave_out: tuple[str, ...] = ()
    problems: list[Prompt] = field(init=False, repr=False, compare=False)
    seats: list[Prompt] = field(init=False, repr=False, compare=False)
    """the problems with those of `leave_out`, so that the order of the others stays the same"""
    left_out: dict[str, int] = field(init=False, repr=False, compare=False)
    """number of problems by the reason for leaving them out"""
    files: dict[str, str] = field(init=False, repr=False, compare=False)
    """paths of the files that were read, by name"""
    digests: dict[str, str] = field(init=False, repr=False, compare=False)
    """SHA-256 of rows that are no files here, by name"""
    _statements: dict[str, str] = field(init=False, repr=False, compare=False)
    """problems as they are in the data, by id"""
    _places: dict[str, str] = field(init=False, repr=False, compare=False)
    """places in the data, by id"""
    _bad: BadRows = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._refuse_wrong_options()
        self._set(seats=[], left_out={}, files={}, digests={})
        self._set(_statements={}, _places={}, _bad=BadRows())
        self._read_rows(find_template(self.template or self.default_template))
        self._set(problems=self._without_named(self.seats))
        if self.leave_out:
            num_named = len(self.seats) - len(self.problems)
            self.left_out[NAMED] = self.left_out.get(NAMED, 0) + num_named
        if self.bad_rows == STOP:
            self._bad.refuse(has_good=bool(self.seats))
        self.left_out.update(self._bad.left_out)
        self._refuse_empty()
        for source in self.exclude:
            statements, read = excluded(source, seed=self.seed)
            rest = self.without(statements, source.rpartition("/")[2])
            self._set(seats=rest.seats, problems=rest.problems, left_out=rest.left_out)
            self.files.update(read.files)
            self.digests.update(read.digests)

    def _read_rows(self, template: str) -> None:
        """Fill the seats; bad rows and those that a filter leaves out are counted."""
        seen: set[tuple[str, str]] = set()
        unknown = set(self.leave_out)
        for number, row in enumerate(self.rows()):
            where = getattr(row, "where", f"row {number + 1} of {self.path or self.name!r}")
            key = row_id(row, number, self._column("id"))
            try:
                standard = _read_with(self.standard_row, row)
                key = row_id(standard, number, self._column("id"))
                unknown.discard(key)
                if key in self._places:  # equal ids would get the same random numbers
                    key = f"{key}@{number}"
                statement, problem = self._problem(key, standard, template)
                reason = self._reason_against(standard, statement, problem.answer, seen)
            except BadRow as bad:
                if key in self.leave_out:
                    unknown.discard(key)
                    self.left_out[NAMED] = self.left_out.get(NAMED, 0) + 1
                else:
                    self._bad.add(where, bad)
                continue
            unknown.discard(key)
            if reason is not None:
                self.left_out[reason] = self.left_out.get(reason, 0) + 1
                continue
            self._statements[key], self._places[key] = statement, where
            self.seats.append(problem)
        for key in sorted(unknown):
            raise ValueError(
                f"task.leave_out has {key!r}, which is the id of no row of "
                f"{self.path or self.name}{did_you_mean(key, self._places)}: remove it, or write "
                "the id as it is in the data, or else the number of the row from 0."
            )

    def _problem(self, key: str, row: Mapping[str, Any], template: str) -> tuple[str, Prompt]:
        """Return the problem as it is in a row, and its prompt; raises BadRow."""
        asked = read_problem(row, self.columns or {})
        answer = read_answer(row, self.columns or {}, asked.reply)
        system = asked.system or self.system
        texts = {"problem": asked.statement, "answer": answer, "id": key, "system message": system}
        for what, text in texts.items():
            check_text(what, text)
        if not asked.text.strip():
            raise BadRow("has an empty problem")
        extra = {name: column_of(row, name, "task.extra_columns") for name in self.extra_columns}
        details = extra | _read_with(self.details, row)
        check_details(details)
        return asked.statement, Prompt(
            id=key,
            text=template.replace("{problem}", asked.text),
            answer=answer,
            task=self.name,
            details=details,
            system=system,
            chat={} if self.thinking is None else {"enable_thinking": self.thinking},
            history=asked.history,
        )

    def _column(self, name: str) -> str:
        return (self.columns or {}).get(name, name)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the problems: a task sent to another process only grades there."""
        return {name: value for name, value in vars(self).items() if name not in DATA}

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin._set(**vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of `path`, or of the task's own data set on the hub."""
        if self.path is not None:
            source = DataSource(self.path, self.subset, self.split, self.revision)
            self._set(files=source.files, digests=source.digests)
            return source.rows(self._bad)
        if self.hub is None:
            raise ValueError(
                f"The task {self.name} needs task.path: a file, a folder, or hf:owner/name."
            )
        for key in ("subset", "revision"):
            if getattr(self, key) is not None:
                raise ValueError(f"task.{key} needs task.path = 'hf:owner/name': set it too.")
        split = self.split or self.hub.splits[0]
        if split not in self.hub.splits:
            raise ValueError(
                f"The task {self.name} has no split {split!r}: set task.split to "
                f"{' or '.join(self.hub.splits)}."
            )
        files = self.hub.fetch(split)
        self.files.update(
            {f"{self.hub.repository}/{file.rpartition('/')[2]}": file for file in files}
        )
        return (row for file in files for row in read_rows(file, self._bad))

    def standard_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with the fields `problem` and `answer`."""
        return row

    def details(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the grader needs in addition to the answer."""
        return {}

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the completion's final answer equals the row's; otherwise 0.

        A template with a box requires one, and thinking must have ended.
        """

        return grade_math(
            completion,
            prompt.answer,
            require_boxed=r"\boxed" in find_template(self.template or self.default_template),
            thinking=bool(self.thinking),
        )

    @property
    def needs_answer(self) -> bool:
        """Whether the grader compares with the answer: this class's does."""
        return type(self).grade is ProblemTask.grade

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt of the endless stream; the order differs per epoch.

        A problem of `leave_out` keeps its seat in the order, and another one takes it: so the
        prompts of all other indices are what they were.
        """
        epoch, position = divmod(index, len(self.seats))
        seat = _epoch_order(self.seed, epoch, len(self.seats), self.shuffle)[position]
        problem = self.seats[seat]
        if problem.id not in self.leave_out:
            return replace(problem, id=f"{problem.id}#{epoch}")
        rng = random.Random(f"{self.seed}:{epoch}:{seat}:left out")
        while problem.id in self.leave_out:
            problem = rng.choice(self.seats)
        return replace(problem, id=f"{problem.id}#{epoch}.{seat}")

    def row_of(self, prompt: Prompt) -> RowOrigin | None:
        """Return where a prompt comes from."""
        key = prompt.id if prompt.id in self._places else prompt.id.rpartition("#")[0]
        if key not in self._places:
            return None
        return RowOrigin(self._places[key], key, self.leave_out)

    def statements(self) -> Collection[str]:
        """Return the problems as they are in the data, without the template."""
        return [self._statements[problem.id] for problem in self.problems]

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the task without these problems, compared by `normalized_words`."""
        unwanted = {normalized_words(statement) for statement in statements}
        return self._keep(
            [
                problem
                for problem in self.seats
                if normalized_words(self._statements[problem.id]) not in unwanted
            ],
            f"also in {where}",
        )

    def fitted(self, checks: PromptChecks) -> Self:
        """Return the task without prompts that are too long or bad; see `bad_rows`."""
        needs_answer = checks.needs_answers or (checks.task_grades and self.needs_answer)
        limit = math.inf if self.max_prompt_tokens is None else self.max_prompt_tokens
        short: list[Prompt] = []
        good: list[Prompt] = []
        bad = BadRows()
        for problem, num_tokens in checks.counted(self.seats, self.name):
            if isinstance(num_tokens, int) and num_tokens > limit:
                continue
            short.append(problem)
            try:
                if problem.id not in self.leave_out:
                    checks.check(problem, num_tokens, needs_answer=needs_answer)
                good.append(problem)
            except BadRow as reason:
                bad.add(self._places[problem.id], reason)
        if self.bad_rows == STOP:
            bad.refuse(has_good=bool(good))
        rest = self
        if self.max_prompt_tokens is not None:
            rest = rest._keep(short, f"longer than {self.max_prompt_tokens} tokens")
        for reason in bad.left_out:
            rest = rest._keep(good, reason)
        return rest

    def describe(self) -> str:
        """Return one line with the number of problems, and of those left out by reason."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{self.name}: {len(self.problems):,} problems" + (
            f"; left out: {reasons}" if reasons else ""
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _keep(self, seats: list[Prompt], reason: str) -> Self:
        problems = self._without_named(seats)
        num_less = len(self.problems) - len(problems)
        # also report filters that left out nothing: it shows that they were applied
        left_out = self.left_out | {reason: self.left_out.get(reason, 0) + num_less}
        rest = copy.copy(self)
        rest._set(seats=seats, problems=problems, left_out=left_out)
        rest._refuse_empty()
        return rest

    def _without_named(self, seats: list[Prompt]) -> list[Prompt]:
        named = set(self.leave_out)
        return [problem for problem in seats if problem.id not in named]

    def _reason_against(
        self, row: Mapping[str, Any], statement: str, answer: str, seen: set[tuple[str, str]]
    ) -> str | None:
        """Return why a row is left out, or None; adds the words of a kept row to `seen`."""
        if self.difficulty is not None:
            low, high = self.difficulty
            column = self._column("difficulty")
            measured = number_of(row.get(column))
            if measured is None:
                return f"without {column}"
            if not low < measured < high:
                return f"not of {column} between {low:g} and {high:g}"
        if self.drops_duplicates if self.deduplicate is None else self.deduplicate:
            # equal words with different answers may differ in a sign
            words = normalized_words(statement), normalized_words(answer)
            if words in seen:
                return "duplicates"
            seen.add(words)
        return None

    def _refuse_empty(self) -> None:
        if self.problems:
            return
        if any(self.left_out.values()):
            raise ValueError(
                f"The filters of [task] leave nothing ({self.describe()}): widen them."
            )
        where = f"task.path = {self.path!r}" if self.path else f"The task {self.name}"
        raise ValueError(f"{where} has no rows: give a file with problems.")

    def _refuse_wrong_options(self) -> None:
        check_columns(self.columns)
        if isinstance(self.exclude, str):
            raise ValueError(f"task.exclude must be a list: write [{self.exclude!r}].")
        if self.bad_rows not in (STOP, LEAVE_OUT):
            raise ValueError(
                f"task.bad_rows = {self.bad_rows!r} must be {STOP!r} or {LEAVE_OUT!r}."
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError("task.max_prompt_tokens must be at least 1.")
        if self.difficulty is None:
            return
        if not isinstance(self.difficulty, list | tuple) or len(self.difficulty) != 2:
            raise ValueError(
                f"task.difficulty = {self.difficulty!r} must be two numbers, such as [0, 100]."
            )
        if not self.difficulty[0] < self.difficulty[1]:
            raise ValueError(
                f"task.difficulty = {list(self.difficulty)} leaves nothing: give the lower one "
                "first."
            )


def _read_with(read: Callable[[Mapping[str, Any]], Value], row: Mapping[str, Any]) -> Value:
    """Call a method that a user may have overridden; raises BadRow."""
    try:
        return read(row)
    except BadRow:
        raise
    except Exception as error:  # a user's code may raise anything
        raise BadRow(f"can't be read ({type(error).__name__}: {first_line(error)})") from error


@lru_cache(maxsize=64)
def _epoch_order(seed: int, epoch: int, num_rows: int, shuffle: bool) -> list[int]:
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def find_template(template: str) -> str:
    """Return the text of a template, given by name or as the text itself."""
    text = TEMPLATES.get(template, template)
    if "{problem}" not in text:
        raise ValueError(
            "task.template must contain {problem}, where the problem is inserted, or be one of "
            f"{', '.join(TEMPLATES)}{did_you_mean(template, TEMPLATES)}."
        )
    return text
