"""CISPO: a score-function gradient with a capped importance weight."""

from dataclasses import dataclass

from torch import Tensor

from trustbatch.objectives.base import Objective, Totals, require_number
from trustbatch.objectives.estimators import bounded
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class CISPO(Objective):
    """loss = -(1/N) sum sg(min(r, 1 + clip_high)) A logp.

    MiniMax 2025. Like P3O's first term with a constant cap.
    """

    clip_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("clip_high", self.clip_high)

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the capped score-function loss averaged over the step's tokens."""
        ratio = bounded(tokens.logp.detach() - tokens.behavior_logp).exp()
        cap = 1.0 + self.clip_high
        loss = -totals.per_token(ratio.clamp(max=cap) * tokens.advantage * tokens.logp)
        return loss, {
            "ratio/capped_fraction": Mean.of((ratio > cap).float()),
            "weight/cap": Mean.of(ratio.new_full(ratio.shape, cap)),
        }
