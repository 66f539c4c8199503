"""From completions to rewards: `Scorer` is the way in, docs/rewards.md says what it can do."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustbatch.rewards.graded import rewards_of
    from trustbatch.rewards.scorer import Scorer

__all__ = ["Scorer", "rewards_of"]


def __getattr__(name: str) -> Any:
    # grading processes import this package, and must not wait for torch
    if name == "Scorer":
        from trustbatch.rewards.scorer import Scorer

        return Scorer
    if name == "rewards_of":
        from trustbatch.rewards.graded import rewards_of

        return rewards_of
    raise AttributeError(f"module 'trustbatch.rewards' has no attribute {name!r}")
