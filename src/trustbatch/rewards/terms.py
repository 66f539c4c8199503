r"""The terms that a reward may be made of; their fields are the options of [[reward.terms]].

To add one, write a dataclass with `grade(sample)` and name it in `TERMS`. It is sent to the
grading processes, so it must be picklable and must not need torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from trustbatch.math_grading.final_answers import last_box
from trustbatch.math_grading.math_answers import grade_math
from trustbatch.math_grading.math_answers import prepare as prepare_math
from trustbatch.rewards.functions import check_path, load_function, takes_details
from trustbatch.rewards.grading import grade_completion
from trustbatch.rewards.http_reward import HttpTerm
from trustbatch.rewards.term import BatchTerm, Sample, Term, checked, is_finite
from trustbatch.utils.options import check_options, find_entry


@dataclass(frozen=True, kw_only=True)
class TaskTerm(Term):
    """The task's own grader."""

    task: Any = None

    @property
    def runs_here(self) -> bool:
        """Whether the task says so."""
        return getattr(self.task, "grades_in_process", False)

    def prepare(self) -> None:
        """Most tasks compare numbers."""
        prepare_math()

    def grade(self, sample: Sample) -> float:
        """Return what the task's grader says."""
        return grade_completion(self.task, sample.prompt, sample.completion, sample.turns)


@dataclass(frozen=True, kw_only=True)
class MathTerm(Term):
    """1 where the final answer equals the prompt's, see `grade_math`."""

    require_boxed: bool = False
    decimals: int | None = None
    tolerance: float = 0.0
    percent: bool = False
    require_unit: bool = False
    thinking: bool | None = None
    """the prompt opens the thinking; unless told, where task.thinking = true"""

    def prepare(self) -> None:
        """Load what hard answers need."""
        prepare_math()

    def grade(self, sample: Sample) -> float:
        """Compare with the prompt's answer."""
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        if self.thinking is None:
            options["thinking"] = sample.prompt.chat.get("enable_thinking") is True
        return grade_math(sample.completion, sample.prompt.answer, **options)


@dataclass(frozen=True, kw_only=True)
class FormatTerm(Term):
    r"""1 where the completion has the asked form, otherwise 0."""

    boxed: bool = False
    r"""there is a \boxed{...}, and the last one is closed"""
    think: bool = False
    """there is exactly one </think>, with at most one <think>, and that before all else"""
    pattern: str | None = None
    """a regular expression is found; the dot matches line ends"""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a term that asks for nothing, or a broken pattern."""
        if not self.boxed and not self.think and self.pattern is None:
            raise ValueError("format needs boxed = true, think = true or a pattern.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"format.pattern is no regular expression: {error}.") from error

    def grade(self, sample: Sample) -> float:
        """Look at the form alone."""
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
    """the rollout's unless told"""

    @property
    def runs_here(self) -> bool:
        """It only counts."""
        return True

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a buffer that is no part of the allowed length."""
        longest = self.max_tokens if self.max_tokens is not None else max_tokens
        if longest is None:
            raise ValueError("overlong needs max_tokens.")
        if not 0 < self.buffer <= longest:
            raise ValueError(
                f"overlong.buffer = {self.buffer} must be from 1 to the {longest} tokens of the "
                "longest completion."
            )

    def grade(self, sample: Sample) -> float:
        """Count tokens."""
        assert self.max_tokens is not None
        free = self.max_tokens - self.buffer
        return -min(max((sample.num_tokens - free) / self.buffer, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class FunctionTerm(Term):
    """A function f(prompt, completion, answer) -> float of texts, and `details` if it has that."""

    arguments: ClassVar = ("prompt", "completion", "answer")

    path: str

    def check(self, *, max_tokens: int | None) -> None:
        """Look whether it is there."""
        check_path(self.path)

    def prepare(self) -> None:
        """Import it."""
        load_function(self.path, *self.arguments)

    def grade(self, sample: Sample) -> float:
        """Call it."""
        function = load_function(self.path, *self.arguments)
        prompt = sample.prompt
        options = {"details": prompt.details} if takes_details(function) else {}
        return function(prompt.text, sample.completion, prompt.answer, **options)


@dataclass(frozen=True, kw_only=True)
class BatchFunctionTerm(BatchTerm):
    """A function f(prompts, completions, answers) -> list[float] of lists of texts."""

    arguments: ClassVar = ("prompts", "completions", "answers")

    path: str
    time_limit: float = 60.0
    """seconds for a whole batch"""

    def check(self, *, max_tokens: int | None) -> None:
        """Look whether it is there."""
        check_path(self.path)
        if not self.time_limit > 0:
            raise ValueError("batch_function.time_limit must be above 0.")

    def prepare(self) -> None:
        """Import it."""
        load_function(self.path, *self.arguments)

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Call it with the whole batch; runs in a grading process."""
        values = list(
            load_function(self.path, *self.arguments)(
                [sample.prompt.text for sample in samples],
                [sample.completion for sample in samples],
                [sample.prompt.answer for sample in samples],
            )
        )
        if len(values) != len(samples):
            raise ValueError(f"it returned {len(values)} rewards for {len(samples)} completions")
        return [float(value) if is_finite(value) else None for value in values]


@dataclass(frozen=True)
class PooledTerms:
    """The terms that grade one completion together, in one process."""

    terms: tuple[tuple[str, Term], ...]

    def prepare(self) -> None:
        """Load what they need."""
        for _, term in self.terms:
            term.prepare()

    def __call__(self, sample: Sample) -> dict[str, float]:
        """Return the value of each term by its label."""
        return {label: checked(label, term.grade(sample)) for label, term in self.terms}


def build_term(name: str, options: Mapping[str, Any]) -> Term | BatchTerm:
    """Build a term by name; a wrong name or option is refused with the nearest right one."""
    make = find_entry(TERMS, name, kind="reward term")
    check_options(make, options, what=f"reward term {name}", table=name, hidden=("task",))
    return make(**options)


def default_label(name: str, options: Mapping[str, Any]) -> str:
    """Return the name of a term's part in metrics: that of a function, else the kind's."""
    return str(options["path"]).rpartition(":")[2] if "path" in options else name


TERMS: dict[str, type[Any]] = {
    "task": TaskTerm,
    "math": MathTerm,
    "format": FormatTerm,
    "overlong": OverlongTerm,
    "function": FunctionTerm,
    "batch_function": BatchFunctionTerm,
    "http": HttpTerm,
}
