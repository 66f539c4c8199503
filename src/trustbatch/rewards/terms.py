r"""The terms of a reward; their fields are the options of [[reward.terms]].

To add one, write a dataclass with `grade(sample)` and register it in `TERMS`. It is sent to the
grading processes, so it must be picklable and must not import torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trustbatch.math_grading.extract import last_box
from trustbatch.math_grading.grade import grade_math
from trustbatch.math_grading.grade import prepare as prepare_math
from trustbatch.rewards.base import BatchTerm, Sample, Term, is_finite
from trustbatch.rewards.functions import BatchFunctionTerm, FunctionTerm
from trustbatch.rewards.judge import JudgeTerm
from trustbatch.rewards.servers import HttpTerm
from trustbatch.tasks.base import grade_completion
from trustbatch.utils.imports import code_path
from trustbatch.utils.options import check_options, find_entry


@dataclass(frozen=True, kw_only=True)
class TaskTerm(Term):
    """The task's own grader."""

    task: Any = None

    @property
    def runs_in_process(self) -> bool:
        """Whether the task sets `grades_in_process`."""
        return getattr(self.task, "grades_in_process", False)

    def prepare(self) -> None:
        """Prepare math grading, which most tasks use."""
        prepare_math()

    def grade(self, sample: Sample) -> float:
        """Return the reward of the task's grader."""
        return grade_completion(self.task, sample.prompt, sample.completion, sample.turns)


@dataclass(frozen=True, kw_only=True)
class MathTerm(Term):
    """1 if the final answer equals the prompt's; `grade_math` documents the options."""

    require_boxed: bool = False
    decimals: int | None = None
    tolerance: float = 0.0
    percent: bool = False
    require_unit: bool = False
    thinking: bool | None = None
    """the prompt opens <think>; default: task.thinking"""

    def prepare(self) -> None:
        """Import what hard answers need."""
        prepare_math()

    def grade(self, sample: Sample) -> float:
        """Compare with the prompt's answer."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        if self.thinking is None:
            options["thinking"] = sample.prompt.chat.get("enable_thinking") is True
        return grade_math(sample.completion, sample.prompt.answer, **options)


@dataclass(frozen=True, kw_only=True)
class FormatTerm(Term):
    r"""1 if the completion has the required format, otherwise 0."""

    boxed: bool = False
    r"""require a \boxed{...}, of which the last one is closed"""
    think: bool = False
    """require exactly one </think>, and at most one <think>, at the very beginning"""
    pattern: str | None = None
    """require a match of this regular expression; the dot matches newlines"""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a term without requirements, or an invalid pattern."""
        if not self.boxed and not self.think and self.pattern is None:
            raise ValueError("format needs boxed = true, think = true or a pattern.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"format.pattern is not a regular expression: {error}.") from error

    def grade(self, sample: Sample) -> float:
        """Return 1 if all requirements are met."""
        text = sample.completion
        if self.boxed:
            box = last_box(text)
            if box is None or box[1] is None:
                return 0.0
        if self.think:
            before, _, after = text.partition("</think>")
            opened = before.lstrip().removeprefix("<think>")
            if before == text or "</think>" in after or "<think>" in opened + after:
                return 0.0
        matches = self.pattern is None or re.search(self.pattern, text, re.DOTALL)
        return float(bool(matches))


@dataclass(frozen=True, kw_only=True)
class OverlongTerm(Term):
    """DAPO's soft penalty: 0 up to `max_tokens - buffer`, then linearly down to -1."""

    buffer: int
    max_tokens: int | None = None
    """default: rollout.max_tokens"""

    @property
    def runs_in_process(self) -> bool:
        """Always: it only counts tokens."""
        return True

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a buffer that is longer than the longest completion."""
        longest = self.max_tokens if self.max_tokens is not None else max_tokens
        if longest is None:
            raise ValueError("overlong needs max_tokens.")
        if not 0 < self.buffer <= longest:
            raise ValueError(
                f"overlong.buffer = {self.buffer} must be from 1 to the {longest} tokens of the "
                "longest completion."
            )

    def grade(self, sample: Sample) -> float:
        """Return the penalty for the number of tokens."""
        assert self.max_tokens is not None
        free = self.max_tokens - self.buffer
        return -min(max((sample.num_tokens - free) / self.buffer, 0.0), 1.0)


def _finite(label: str, value: Any) -> float:
    """Return a finite number, and refuse anything else."""
    if not is_finite(value):
        raise ValueError(
            f"{label} returned {repr(value)[:80]}, which is not a number from -1e12 to 1e12"
        )
    return float(value)


@dataclass(frozen=True)
class PooledTerms:
    """Terms that grade a completion together, in one process."""

    terms: tuple[tuple[str, Term], ...]

    def prepare(self) -> None:
        """Import what the terms need."""
        for _, term in self.terms:
            term.prepare()

    def __call__(self, sample: Sample) -> dict[str, float]:
        """Return the value of each term by label."""
        return {label: _finite(label, term.grade(sample)) for label, term in self.terms}


def build_term(name: str, options: Mapping[str, Any]) -> Term | BatchTerm:
    """Build a term by name; a wrong name or option is refused with the nearest right one."""
    make = find_entry(TERMS, name, kind="reward term")
    check_options(make, options, what=f"reward term {name}", table=name, hidden=("task",))
    return make(**options)


def default_label(name: str, options: Mapping[str, Any]) -> str:
    """Return a term's default name in metrics: that of its function, or else of the term."""
    if "path" not in options:
        return name
    path = options["path"]
    return (path if isinstance(path, str) else code_path(path)).rpartition(":")[2]


TERMS: dict[str, type[Any]] = {
    "task": TaskTerm,
    "math": MathTerm,
    "format": FormatTerm,
    "overlong": OverlongTerm,
    "function": FunctionTerm,
    "batch_function": BatchFunctionTerm,
    "http": HttpTerm,
    "judge": JudgeTerm,
}
