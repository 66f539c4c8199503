"""What a term of a reward is: its input, its two kinds, and which values it may return."""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trustbatch.types import Grade, GradeStatus, Prompt, Turn
from trustbatch.utils.worker import MAX_REASON_LENGTH, Outcome

LARGEST_REWARD = 1e12
"""beyond it, a mean or a standard deviation over a batch would lose the other rewards"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The input of a term: one completion and its prompt."""

    prompt: Prompt
    completion: str
    num_tokens: int
    turns: tuple[Turn, ...] = ()
    """of an episode, if an environment replied"""
    is_truncated: bool = False
    """whether it ended at the token limit; an episode out of turns did not"""
    failure: Grade | None = None
    """why its episode could not be played to its end: no term sees it"""


class Term:
    """Grades one completion at a time, by default in a grading process."""

    @property
    def runs_in_process(self) -> bool:
        """Whether it is cheap, bounded and trusted, and so needs no grading process."""
        return False

    def prepare(self) -> None:
        """Import what is needed, before the time limit of the first completion starts."""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse unusable options; `max_tokens` is rollout.max_tokens."""

    def grade(self, sample: Sample) -> float:
        """Return the value of this term."""
        raise NotImplementedError


class BatchTerm:
    """Grades a whole batch at once."""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse unusable options; `max_tokens` is rollout.max_tokens."""


class ServerTerm(BatchTerm):
    """Asks a server, from the training process: waiting needs no process of its own."""

    def outcomes(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample."""
        raise NotImplementedError


def failure(status: GradeStatus, reason: str) -> Outcome:
    """Return the outcome of a sample without a value."""
    return Outcome(status, reason=reason[:MAX_REASON_LENGTH])


def is_finite(value: Any) -> bool:
    """Whether something is a finite number, of a size that can be averaged and squared."""
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= LARGEST_REWARD
    except OverflowError:  # an integer that is too large for a float
        return False
