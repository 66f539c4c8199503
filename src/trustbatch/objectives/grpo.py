"""GRPO: PPO's clipped surrogate on group-relative advantages."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.objectives.base import ClipKind, Objective, Totals, require_number
from trustbatch.objectives.estimators import bounded
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class GRPO(Objective):
    """loss = -(1/N) sum min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Shao et al. 2024; the paper's equation for PPO, with the ratio taken to the behavior policy.
    Differences from the original: the mean is over all tokens of the step, not over sequences
    first, and the reference KL is off by default.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    clips_behavior_ratio: ClassVar[ClipKind | None] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("clip_low", self.clip_low, high=1.0)
        require_number("clip_high", self.clip_high)

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate averaged over the step's tokens."""
        ratio = bounded(tokens.logp - tokens.behavior_logp).exp()
        surrogate, metrics = clipped_surrogate(
            ratio, tokens.advantage, clip_low=self.clip_low, clip_high=self.clip_high
        )
        return -totals.per_token(surrogate), metrics


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """Return min(r A, clip(r) A), elementwise, and the fraction of elements without gradient."""
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    dropped = (clipped * advantage < ratio * advantage).detach().float()
    return surrogate, {"ratio/clipped_fraction": Mean.of(dropped)}
