"""Problems with an answer: the base class of tasks that read data.

A subclass names its data set on the hub, and overrides `standard_row` if the columns have other
names, and `grade` if the answers are not math.
"""

import copy
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from trustbatch.errors import did_you_mean
from trustbatch.math_grading.grade import grade_math
from trustbatch.tasks.data_files import HubDataset, read_rows
from trustbatch.tasks.filters import normalized_words, statements_of
from trustbatch.types import Prompt

PROMPTS_PER_PROGRESS_LINE = 5000
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
    """number of problems by the reason for leaving them out"""
    _statements: dict[str, str] = field(init=False, repr=False, compare=False)
    """problems as they are in the data, by id"""

    def __post_init__(self) -> None:
        self._refuse_wrong_options()
        template = find_template(self.template or self.default_template)
        problems: dict[str, Prompt] = {}
        statements: dict[str, str] = {}
        left_out: dict[str, int] = {}
        seen: set[tuple[str, str]] = set()
        for number, row in enumerate(map(self.standard_row, self.rows())):
            statement, answer = self._read(number, row)
            reason = self._reason_against(row, statement, answer, seen)
            if reason is not None:
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            key = str(number if row.get("id") is None else row["id"])
            if key in problems:  # prompts with equal ids would get the same random numbers
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
            rest = self.without(statements_of(source, seed=self.seed), source.rpartition("/")[2])
            self._set(problems=rest.problems, left_out=rest.left_out)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the problems: a task sent to another process only grades there."""
        return {k: v for k, v in vars(self).items() if k not in ("problems", "_statements")}

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin._set(**vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of the file, or of the data set on the hub."""
        if self.path is not None:
            if self.split is not None:
                raise ValueError(
                    "task.split selects a split on the hub: remove it, or remove task.path."
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

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt of the endless stream; the order differs per epoch."""
        epoch, position = divmod(index, len(self.problems))
        order = _epoch_order(self.seed, epoch, len(self.problems), self.shuffle)
        problem = self.problems[order[position]]
        return replace(problem, id=f"{problem.id}#{epoch}")

    def statements(self) -> Collection[str]:
        """Return the problems as they are in the data, without the template."""
        return [self._statements[problem.id] for problem in self.problems]

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the task without these problems, compared by `normalized_words`."""
        unwanted = {normalized_words(statement) for statement in statements}
        return self._keep(
            [
                problem
                for problem in self.problems
                if normalized_words(self._statements[problem.id]) not in unwanted
            ],
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
            if number % PROMPTS_PER_PROGRESS_LINE == 0:
                say(f"{self.name}: tokenized {number:,} of {len(self.problems):,} prompts")
        return self._keep(kept, f"longer than {self.max_prompt_tokens} tokens")

    def describe(self) -> str:
        """Return one line with the number of problems, and of those left out by reason."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{self.name}: {len(self.problems):,} problems" + (
            f"; left out: {reasons}" if reasons else ""
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _keep(self, problems: list[Prompt], reason: str) -> Self:
        num_less = len(self.problems) - len(problems)
        # also report filters that left out nothing: it shows that they were applied
        left_out = self.left_out | {reason: self.left_out.get(reason, 0) + num_less}
        rest = copy.copy(self)
        rest._set(problems=problems, left_out=left_out)
        rest._refuse_empty()
        return rest

    def _reason_against(
        self, row: Mapping[str, Any], statement: str, answer: str, seen: set[tuple[str, str]]
    ) -> str | None:
        """Return why a row is left out, or None; adds the words of a kept row to `seen`."""
        if self.difficulty is not None:
            low, high = self.difficulty
            measured = row.get(self.difficulty_field)
            if not isinstance(measured, int | float):
                return f"without {self.difficulty_field}"
            if not low < measured < high:
                return f"not of {self.difficulty_field} between {low:g} and {high:g}"
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
                f"task.difficulty = {list(self.difficulty)} leaves nothing: give the lower one "
                "first."
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


def find_template(template: str) -> str:
    """Return the text of a template, given by name or as the text itself."""
    text = TEMPLATES.get(template, template)
    if "{problem}" not in text:
        raise ValueError(
            "task.template must contain {problem}, where the problem is inserted, or be one of "
            f"{', '.join(TEMPLATES)}{did_you_mean(template, TEMPLATES)}."
        )
    return text
