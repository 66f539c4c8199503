"""Grading for all ranks at once: the first one grades, and all get what it found."""

from collections.abc import Sequence
from typing import Protocol

from trustbatch.types import RolloutGroup
from trustbatch.utils.distributed import on_rank_zero


class GroupScorer(Protocol):
    """Gives a grade to every completion."""

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a grade for every completion."""
        ...

    def close(self) -> None:
        """End all processes that grade."""
        ...


class SharedScorer:
    """Lets rank 0 grade: a grader need not give the same answer twice. Collective."""

    def __init__(self, own: GroupScorer) -> None:
        self.own = own

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with the grades that rank 0 gave."""
        return on_rank_zero(lambda: self.own.score(groups))

    def close(self) -> None:
        """End the processes of this rank."""
        self.own.close()
