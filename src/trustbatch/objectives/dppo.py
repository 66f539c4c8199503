"""DPPO: mask tokens by the change of their probability, not by their ratio."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.objectives.base import ClipKind, Objective, Totals, require_choice, require_number
from trustbatch.objectives.estimators import bounded
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch

DIVERGENCES = ("tv", "kl")
SMALLEST_REST = 1e-8  # the rest of the distribution where a token is almost certain


@dataclass(frozen=True, kw_only=True)
class DPPO(Objective):
    """loss = -(1/N) sum sg(M min(r, weight_cap)) A logp.

    M = 0 where the update would move p further from p_b (A > 0 and p > p_b, or A < 0 and p < p_b)
    and the divergence of "this token or another" is above `threshold`: |p - p_b| for "tv",
    KL(p_b || p) for "kl". Qi et al. 2026, their binary approximation.
    """

    divergence: str = "tv"
    threshold: float = 0.15
    weight_cap: float = 20.0

    clips_behavior_ratio: ClassVar[ClipKind | None] = "probability"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("divergence", self.divergence, DIVERGENCES)
        require_number("threshold", self.threshold)
        require_number("weight_cap", self.weight_cap)

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the masked score-function loss averaged over the step's tokens."""
        logp, behavior = tokens.logp.detach(), tokens.behavior_logp
        ratio = bounded(logp - behavior).exp()
        outward = (logp - behavior) * tokens.advantage.sign() > 0
        dropped = outward & (self._divergence(logp, behavior) > self.threshold)
        weight = ratio.clamp(max=self.weight_cap).masked_fill(dropped, 0.0)
        loss = -totals.per_token(weight * tokens.advantage * tokens.logp)
        return loss, {
            "ratio/masked_fraction": Mean.of(dropped.float()),
            "ratio/capped_fraction": Mean.of((ratio > self.weight_cap).float()),
            "weight/cap": Mean.of(ratio.new_full(ratio.shape, self.weight_cap)),
        }

    def _divergence(self, logp: Tensor, behavior_logp: Tensor) -> Tensor:
        p_b = behavior_logp.exp()
        if self.divergence == "tv":
            return (logp.exp() - p_b).abs()
        rest = (-torch.expm1(logp)).clamp(min=SMALLEST_REST)
        rest_b = (-torch.expm1(behavior_logp)).clamp(min=SMALLEST_REST)
        return rest_b * torch.log(rest_b / rest) - p_b * bounded(logp - behavior_logp)
