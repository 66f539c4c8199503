"""From completions to rewards: `Scorer` is the entry point, documented in docs/rewards.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trustbatch.rewards.scorer import GroupScorer, Scorer, SharedScorer, rewards_of

__all__ = ["GroupScorer", "Scorer", "SharedScorer", "rewards_of"]


def __getattr__(name: str) -> Any:
    # lazy: grading processes import this package, and must not import torch
    if name in __all__:
        from trustbatch.rewards import scorer

        return getattr(scorer, name)
    raise AttributeError(f"module 'trustbatch.rewards' has no attribute {name!r}")
