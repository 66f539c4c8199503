"""From completions to rewards."""

from trustbatch.rewards.scoring import Scorer, rewards_of

__all__ = ["Scorer", "rewards_of"]
