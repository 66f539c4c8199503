"""Problems with an answer: what the tasks that read data have in common.

A task is a class with the name of its data set on the hub, `plain` to read its rows, and `grade`.
"""

import copy
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.rows import read_rows
from trustbatch.tasks.same_problem import words_of
from trustbatch.tasks.templates import find_template
from trustbatch.types import Prompt

NUM_BETWEEN_LINES = 5000
"""prompts tokenized from one line of progress to the next"""


@dataclass(frozen=True, kw_only=True)
class ProblemTask:
    """Rows of a data set, shuffled anew in each epoch by the seed."""

    hub: ClassVar[HubDataset | None] = None
    """where the data is unless `path` is given"""
    usual_template: ClassVar[str] = "boxed"
    drops_duplicates: ClassVar[bool] = True

    name: str
    seed: int = 0
    path: str | None = None
    split: str | None = None
    template: str | None = None
    system: str = ""
    thinking: bool | None = None
    problem_field: str = "problem"
    answer_field: str = "answer"
    shuffle: bool = True
    deduplicate: bool | None = None
    difficulty: tuple[float, float] | None = None
    difficulty_field: str = "difficulty"
    max_prompt_tokens: int | None = None
    exclude: tuple[str, ...] = ()
    problems: list[Prompt] = field(init=False, repr=False, compare=False)
    left_out: dict[str, int] = field(init=False, repr=False, compare=False)
    """how many problems, by what was wrong with them"""
    _statements: dict[str, str] = field(init=False, repr=False, compare=False)
    """problems as they are in the data, by id"""

    def __post_init__(self) -> None:
        self._refuse_wrong_options()
        template = find_template(self.template or self.usual_template)
        problems: dict[str, Prompt] = {}
        statements: dict[str, str] = {}
        left_out: dict[str, int] = {}
        seen: set[tuple[str, str]] = set()
        for number, row in enumerate(map(self.plain, self.rows())):
            statement, answer = self._read(number, row)
            reason = self._reason_against(row, statement, answer, seen)
            if reason is not None:
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            key = str(number if row.get("id") is None else row["id"])
            if key in problems:  # equal ids would sample equal samples
                key = f"{key}@{number}"
            statements[key] = statement
            problems[key] = Prompt(
                id=key,
                text=template.replace("{problem}", statement),
                answer=answer,
                task=self.name,
                details=self.details(row),
                system=self.system,
                chat={} if self.thinking is None else {"enable_thinking": self.thinking},
            )
        self._set(problems=list(problems.values()), left_out=left_out, _statements=statements)
        self._refuse_empty()
        for source in self.exclude:
            from trustbatch.tasks.overlap import statements_of  # which builds tasks by name

            rest = self.without(statements_of(source, seed=self.seed), source.rpartition("/")[2])
            self._set(problems=rest.problems, left_out=rest.left_out)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the problems behind: what is sent to another process grades there."""
        return {k: v for k, v in vars(self).items() if k not in ("problems", "_statements")}

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin._set(**vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # nothing of it ever changes

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of the file, or of the data set on the hub."""
        if self.path is not None:
            if self.split is not None:
                raise ValueError(
                    "task.split chooses among the hub's files: remove it, or remove task.path."
                )
            return read_rows(self.path)
        if self.hub is None:
            raise ValueError(f"The task {self.name} needs task.path, a .jsonl or .parquet file.")
        split = self.split or self.hub.splits[0]
        if split not in self.hub.splits:
            raise ValueError(
                f"The task {self.name} has no split {split!r}: set task.split to "
                f"{' or '.join(self.hub.splits)}."
            )
        return (row for file in self.hub.fetch(split) for row in read_rows(file))

    def plain(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with the fields `problem` and `answer`, where the data has other ones."""
        return row

    def details(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the grader needs beside the answer."""
        return {}

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the completion's final answer is worth the same as the row's; otherwise 0.

        A template that asks for a box is taken at its word, and thinking must have ended.
        """
        from trustbatch.math_grading.grade import grade_math

        return grade_math(
            completion,
            prompt.answer,
            require_boxed=r"\boxed" in find_template(self.template or self.usual_template),
            thinking=bool(self.thinking),
        )

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt of the endless stream; each epoch has its own order."""
        epoch, position = divmod(index, len(self.problems))
        order = _epoch_order(self.seed, epoch, len(self.problems), self.shuffle)
        problem = self.problems[order[position]]
        return replace(problem, id=f"{problem.id}#{epoch}")

    def statements(self) -> Collection[str]:
        """Return the problems as they are in the data, without the words around them."""
        return [self._statements[problem.id] for problem in self.problems]

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the task without problems that are also `where`; all by `words_of`."""
        unwanted = {words_of(statement) for statement in statements}
        return self._keep(
            [p for p in self.problems if words_of(self._statements[p.id]) not in unwanted],
            f"also in {where}",
        )

    def fitted(self, num_tokens: Callable[[Prompt], int], say: Callable[[str], None]) -> Self:
        """Return the task without prompts of more than `max_prompt_tokens` tokens."""
        if self.max_prompt_tokens is None:
            return self
        kept = []
        for number, problem in enumerate(self.problems, start=1):
            if num_tokens(problem) <= self.max_prompt_tokens:
                kept.append(problem)
            if number % NUM_BETWEEN_LINES == 0:
                say(f"{self.name}: tokenized {number:,} of {len(self.problems):,} prompts")
        return self._keep(kept, f"longer than {self.max_prompt_tokens} tokens")

    def describe(self) -> str:
        """Say in one line how many problems there are, and how many were left out and why."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{self.name}: {len(self.problems):,} problems" + (
            f"; left out: {reasons}" if reasons else ""
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _keep(self, problems: list[Prompt], reason: str) -> Self:
        num_less = len(self.problems) - len(problems)
        # a reason is told also where it left out nothing: that it was looked for is worth knowing
        left_out = self.left_out | {reason: self.left_out.get(reason, 0) + num_less}
        rest = copy.copy(self)
        rest._set(problems=problems, left_out=left_out)
        rest._refuse_empty()
        return rest

    def _reason_against(
        self, row: Mapping[str, Any], statement: str, answer: str, seen: set[tuple[str, str]]
    ) -> str | None:
        """Return why a row is left out; None, and its words go to `seen`, where it is not."""
        if self.difficulty is not None:
            low, high = self.difficulty
            measured = row.get(self.difficulty_field)
            if not isinstance(measured, int | float):
                return f"without {self.difficulty_field}"
            if not low < measured < high:
                return f"not of {self.difficulty_field} between {low:g} and {high:g}"
        if self.drops_duplicates if self.deduplicate is None else self.deduplicate:
            # the same words with another answer may differ in a sign
            words = words_of(statement), words_of(answer)
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
        if isinstance(self.exclude, str):
            raise ValueError(f"task.exclude must be a list: write [{self.exclude!r}].")
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
                f"task.difficulty = {list(self.difficulty)} leaves nothing: the first of the two "
                "is the lower one."
            )

    def _read(self, number: int, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return problem and answer of a row."""
        where = f"Row {number + 1} of {self.path or self.name!r}"
        for key in (self.problem_field, self.answer_field):
            if key not in row:
                raise ValueError(
                    f"{where} has no field {key!r}: it has {', '.join(row)}; set "
                    "task.problem_field or task.answer_field."
                )
            if isinstance(row[key], bool) or not isinstance(row[key], str | int | float):
                raise ValueError(f"{where} has {key!r} = {row[key]!r}: give text or a number.")
        return str(row[self.problem_field]), str(row[self.answer_field])


@lru_cache(maxsize=64)
def _epoch_order(seed: int, epoch: int, num_rows: int, shuffle: bool) -> list[int]:
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
