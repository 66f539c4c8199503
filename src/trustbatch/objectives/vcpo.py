"""VCPO: sequence weights, and a learning rate scaled by their effective sample size."""

from dataclasses import dataclass

from torch import Tensor

from trustbatch.objectives.base import Objective, Totals, require_number
from trustbatch.objectives.estimators import (
    RatioMoments,
    bounded,
    effective_sample_size,
    sequence_sums,
)
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class VCPO(Objective):
    """loss = -(1/N) sum sg(min(w, weight_cap)) A logp, w the product of the sequence's ratios.

    The step's learning rate is multiplied by sqrt(min(1, e / base_ess)) with the effective sample
    size of the sequences, e = (sum w)^2 / (S sum w^2). Huang et al. 2026, without their off-policy
    optimal baseline: it needs the norm of each sequence's own gradient.
    """

    weight_cap: float = 8.0
    base_ess: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("weight_cap", self.weight_cap)
        require_number("base_ess", self.base_ess, low=1e-6, high=1.0)

    @property
    def totals_need_policy(self) -> bool:
        """Every micro-batch reports the factor of the learning rate."""
        return True

    def moments(self, tokens: TokenBatch) -> dict[str, RatioMoments]:
        """Sums of the sequences' ratios and of their squares."""
        of_sequence, _ = sequence_sums(tokens.logp - tokens.behavior_logp, tokens.sequence)
        return {"sequence": RatioMoments.of(of_sequence)}

    def learning_rate_factor(self, totals: Totals) -> float:
        """Return sqrt(min(1, e / base_ess)) of the step's sequences."""
        return float(self._factor(effective_sample_size(totals.moments["sequence"])))

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the capped score-function loss averaged over the step's tokens."""
        log_ratio = tokens.logp.detach() - tokens.behavior_logp
        of_sequence, place = sequence_sums(log_ratio, tokens.sequence)
        ratio = bounded(of_sequence)[place].exp().to(log_ratio.dtype)
        loss = -totals.per_token(ratio.clamp(max=self.weight_cap) * tokens.advantage * tokens.logp)
        ess = effective_sample_size(totals.moments["sequence"])
        return loss, {
            "ratio/capped_fraction": Mean.of((ratio > self.weight_cap).float()),
            "weight/cap": Mean.of(ratio.new_full(ratio.shape, self.weight_cap)),
            "ess/sequence": Mean.of(ess.expand(ratio.shape)),
            "learning_rate/factor": Mean.of(self._factor(ess).expand(ratio.shape)),
        }

    def _factor(self, ess: Tensor) -> Tensor:
        return (ess / self.base_ess).clamp(max=1.0).sqrt()
