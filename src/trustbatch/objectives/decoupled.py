"""Decoupled PPO: clip against a recent snapshot, correct for the policy that sampled the data."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from trustbatch.objectives.base import Objective, Totals, require, require_number
from trustbatch.objectives.estimators import bounded
from trustbatch.objectives.grpo import clipped_surrogate
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class Decoupled(Objective):
    """loss = -(1/N) sum sg(min(prox / behavior, weight_cap)) min(q A, clip(q) A), q = pi / prox.

    Hilton et al. 2021; the row "Decoupled" of the paper's table of objectives. The proximal policy
    is a snapshot taken at the start of each pass over a batch of rollouts.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    weight_cap: float = 5.0

    needs_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("clip_low", self.clip_low, high=1.0)
        require_number("clip_high", self.clip_high)
        require_number("weight_cap", self.weight_cap)

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the weighted clipped surrogate averaged over the step's tokens."""
        proximal = require(tokens.proximal_logp, "proximal_logp", "decoupled").detach()
        behavior_ratio = bounded(proximal - tokens.behavior_logp).exp()
        surrogate, metrics = clipped_surrogate(
            bounded(tokens.logp - proximal).exp(),
            tokens.advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        loss = -totals.per_token(behavior_ratio.clamp(max=self.weight_cap) * surrogate)
        metrics["ratio/capped_fraction"] = Mean.of((behavior_ratio > self.weight_cap).float())
        metrics["weight/cap"] = Mean.of(surrogate.new_full(surrogate.shape, self.weight_cap))
        return loss, metrics
