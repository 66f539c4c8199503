"""VESPO: a smooth weight of the sequence's ratio, largest near 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.objectives.base import Objective, Totals, require_number
from trustbatch.objectives.estimators import bounded, sequence_sums
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class VESPO(Objective):
    """loss = -(1/N) sum sg(w^k exp(lambda (1 - w))) A logp, w the product of the sequence's ratios.

    Shen et al. 2026, equation 20. k and lambda are those for positive advantages where A >= 0, and
    those for negative ones elsewhere. The weight is 1 at w = 1 and goes to 0 with w and with 1/w.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("k_positive", self.k_positive)
        require_number("lambda_positive", self.lambda_positive)
        require_number("k_negative", self.k_negative)
        require_number("lambda_negative", self.lambda_negative)

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the reweighted score-function loss averaged over the step's tokens."""
        log_ratio = tokens.logp.detach() - tokens.behavior_logp
        of_sequence, place = sequence_sums(log_ratio, tokens.sequence)
        log_w = bounded(of_sequence)[place]
        # a single exponential at the end, since w^k alone may overflow where the product is 0
        log_weight = torch.where(
            tokens.advantage >= 0,
            self.k_positive * log_w + self.lambda_positive * (1.0 - log_w.exp()),
            self.k_negative * log_w + self.lambda_negative * (1.0 - log_w.exp()),
        )
        weight = log_weight.exp().to(tokens.logp.dtype)
        loss = -totals.per_token(weight * tokens.advantage * tokens.logp)
        return loss, {"weight/mean": Mean.of(weight)}
