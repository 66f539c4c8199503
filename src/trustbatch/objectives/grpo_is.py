"""GRPO with importance sampling: the surrogate times a correction for the sampler."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from trustbatch.objectives.base import (
    Objective,
    Totals,
    require,
    require_choice,
    require_number,
)
from trustbatch.objectives.estimators import bounded, sequence_sums
from trustbatch.objectives.grpo import clipped_surrogate
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, kw_only=True)
class GRPOIS(Objective):
    """loss = -(1/N) sum sg(w) min(q A, clip(q) A), q = pi / prox, w from u = prox / behavior.

    u is of the token, or the product over its sequence. `*_truncate` takes w = min(u, cap) (TIS),
    `*_mask` takes w = u where u <= cap and 0 elsewhere (MIS). Yao et al. 2025, Liu et al. 2025; the
    names and defaults are TRL's. A dropped token still counts in N.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: str = "sequence_mask"
    correction_cap: float = 3.0

    needs_proximal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("clip_low", self.clip_low, high=1.0)
        require_number("clip_high", self.clip_high)
        require_choice("correction", self.correction, CORRECTIONS)
        require_number("correction_cap", self.correction_cap)

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the corrected clipped surrogate averaged over the step's tokens."""
        proximal = require(tokens.proximal_logp, "proximal_logp", "grpo_is").detach()
        log_ratio = proximal - tokens.behavior_logp
        if self.correction.startswith("sequence"):
            of_sequence, place = sequence_sums(log_ratio, tokens.sequence)
            log_ratio = of_sequence[place].to(log_ratio.dtype)
        ratio = bounded(log_ratio).exp()
        beyond = ratio > self.correction_cap
        instead = self.correction_cap if self.correction.endswith("truncate") else 0.0
        surrogate, metrics = clipped_surrogate(
            bounded(tokens.logp - proximal).exp(),
            tokens.advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        loss = -totals.per_token(ratio.masked_fill(beyond, instead) * surrogate)
        metrics["ratio/capped_fraction"] = Mean.of(beyond.float())
        metrics["weight/cap"] = Mean.of(surrogate.new_full(surrogate.shape, self.correction_cap))
        return loss, metrics
