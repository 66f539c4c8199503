"""What a term of a reward is, and what it is told."""

import math
import numbers
from dataclasses import dataclass
from typing import Any

from trustbatch.types import Prompt, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a term is told of a completion."""

    prompt: Prompt
    completion: str
    num_tokens: int
    turns: tuple[Turn, ...] = ()
    """of an episode, where an environment answered"""
    is_cut: bool = False
    """whether it ended for want of room; an episode out of turns did not"""


class Term:
    """Grades one completion at a time, in a grading process unless it says otherwise."""

    @property
    def runs_here(self) -> bool:
        """Whether it is cheap, bounded and trusted: then it needs no other process."""
        return False

    def prepare(self) -> None:
        """Load what is needed, before the clock of the first completion starts."""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse options that can't be used, with a sentence; `max_tokens` is the rollout's."""

    def grade(self, sample: Sample) -> float:
        """Return the value of this term."""
        raise NotImplementedError


class BatchTerm:
    """Grades a whole batch at once."""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse options that can't be used, with a sentence."""


def is_finite(value: Any) -> bool:
    """Whether something is a finite number."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def checked(label: str, value: Any) -> float:
    """Return a finite number as it is, and refuse anything else."""
    if not is_finite(value):
        raise ValueError(f"{label} returned {repr(value)[:80]}, which is not a finite number")
    return float(value)
