"""DAPO's loss: the clipped surrogate with a wider range above 1 than below."""

from dataclasses import dataclass

from trustbatch.objectives.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """GRPO's function with DAPO's default bounds ("clip higher"), averaged over tokens.

    Yu et al. 2025. Its dynamic sampling and overlong penalty belong to the data and the reward, not
    to the loss.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
