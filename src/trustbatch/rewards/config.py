"""[reward] and [[reward.terms]]: from completions to rewards."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from trustbatch.rewards.base import BatchTerm, Term
from trustbatch.rewards.terms import build_term, default_label
from trustbatch.utils.imports import code_path
from trustbatch.utils.tables import Changeable, Choice, Table


class RewardTermConfig(Choice):
    """[[reward.terms]]: a part of the reward; its options are the fields of the term's class."""

    kind: ClassVar[str] = "reward term"

    weight: float = 1.0
    """the reward is the sum of all parts, each times its weight"""
    label: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """name of the part in metrics; default: the function's or the term's"""

    @property
    def part(self) -> str:
        """The name of the part."""
        return self.label or default_label(self.name, self.options)

    def check(self) -> None:
        """Build it: a term reads nothing before its `check` or `prepare`."""
        self.build()

    def build(self) -> Term | BatchTerm:
        """Build the term."""
        return build_term(self.name, self.options)

    @model_serializer
    def _flatten(self) -> dict[str, Any]:
        """Return the table; a function given from Python is written as its path."""
        given = {"name": self.name, "weight": self.weight, "label": self.label, **self.options}
        paths = {key: code_path(value) for key, value in given.items() if callable(value)}
        return {key: value for key, value in (given | paths).items() if value is not None}


class RewardConfig(Table):
    """[reward]: from completions to rewards; default: the task's own grader."""

    terms: tuple[RewardTermConfig, ...] = ()
    """parts that add up to the reward"""
    ungraded: Literal["leave_out", "stop"] | float = "leave_out"
    """what happens to a completion whose grader fails; a number is its reward"""
    truncated: Literal["grade", "leave_out"] = "grade"
    """what happens to a completion that reached the token limit"""
    workers: Changeable[int | None] = Field(default=None, ge=1)
    """grading processes; default: one per core"""
    time_limit: Changeable[float] = Field(default=10.0, gt=0.0)
    """seconds for one completion"""
    memory_limit_gib: Changeable[float] = Field(default=2.0, gt=0.0)
    """for one completion, beyond what the grader holds when it is loaded"""
    environment: Changeable[tuple[str, ...]] = ()
    """names of environment variables that graders get beside the usual ones"""

    @property
    def task_grades(self) -> bool:
        """Whether the task's own grader is part of the reward."""
        return not self.terms or any(term.name == "task" for term in self.terms)

    @property
    def needs_answers(self) -> bool:
        """Whether a term compares with the answer, whatever the task."""
        return any(term.name == "math" for term in self.terms)

    @property
    def limits(self) -> "RewardConfig":
        """The limits alone, for an evaluation: there the task's grader says what is right."""
        update = {"terms": (), "ungraded": "leave_out", "truncated": "grade"}
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _check(self) -> "RewardConfig":
        parts = [term.part for term in self.terms]
        for part in parts:
            if parts.count(part) > 1:
                raise ValueError(
                    f"reward.terms has two called {part!r}: give each a label of its own"
                )
        return self
