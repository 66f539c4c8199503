"""M2PO: mask the tokens with the largest squared log-ratios until the mean is low enough."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.objectives.base import ClipKind, Objective, Totals, require_number
from trustbatch.objectives.estimators import bounded
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class M2PO(Objective):
    """loss = -(1/N) sum M r A.

    Of the tokens that PPO could clip (A > 0 and r > 1, or A < 0 and r < 1) those with the largest
    (log r)^2 have M = 0, as many as necessary for the mean of (log r)^2 over the rest to be at most
    `threshold`. Zheng et al. 2025, Algorithm 1 and equation 5. The mean is over the whole
    optimizer step.
    """

    threshold: float = 0.04

    clips_behavior_ratio: ClassVar[ClipKind | None] = "mask"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("threshold", self.threshold)

    @property
    def totals_need_policy(self) -> bool:
        """Which tokens are masked depends on all tokens of the step."""
        return True

    def pools(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """The squared log-ratios of the tokens that may be masked."""
        second_moment, may_drop = self._second_moments(tokens)
        return {"second_moment": second_moment[may_drop]}

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the masked policy-gradient loss averaged over the step's tokens."""
        ratio = bounded(tokens.logp - tokens.behavior_logp).exp()
        second_moment, may_drop = self._second_moments(tokens)
        limit = largest_to_keep(totals.pools["second_moment"], self.threshold)
        dropped = may_drop & (second_moment >= limit)
        loss = -totals.per_token(ratio.masked_fill(dropped, 0.0) * tokens.advantage)
        return loss, {"ratio/masked_fraction": Mean.of(dropped.float())}

    @staticmethod
    def _second_moments(tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        log_ratio = bounded(tokens.logp.detach() - tokens.behavior_logp).double()
        return log_ratio.square(), log_ratio * tokens.advantage.sign() > 0


def largest_to_keep(values: Tensor, mean: float) -> Tensor:
    """Return the limit below which values >= 0 are kept, so that their mean is at most `mean`.

    It is half-way between the last kept and the first dropped value, so that a second forward pass
    with other rounding gives the same result. Of equal values, all are dropped.
    """
    ordered = values.sort().values
    count = torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device)
    # the mean of the smallest values grows with their number
    num_kept = (ordered.cumsum(0) / count <= mean).sum()
    around = torch.cat([ordered.new_zeros(1), ordered, ordered.new_full((1,), torch.inf)])
    return (around[num_kept] + around[num_kept + 1]) / 2
