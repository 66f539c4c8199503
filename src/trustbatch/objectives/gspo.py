"""GSPO: the clipped surrogate with one ratio per sequence."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.objectives.base import ClipKind, Objective, Totals, require_number
from trustbatch.objectives.estimators import bounded
from trustbatch.objectives.grpo import clipped_surrogate
from trustbatch.objectives.metrics import Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class GSPO(Objective):
    """loss = -(1/S) sum over sequences of min(s A, clip(s) A), s = exp(mean l of the sequence).

    Zheng et al. 2025. The gradient flows through s, so every token of a sequence shares one weight.
    A token that can't be measured is left out of its sequence's mean.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    clips_behavior_ratio: ClassVar[ClipKind | None] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("clip_low", self.clip_low, high=1.0)
        require_number("clip_high", self.clip_high)

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate averaged over the step's sequences."""
        log_ratio = tokens.logp - tokens.behavior_logp
        ids, index = torch.unique(tokens.sequence, return_inverse=True)
        zeros = log_ratio.new_zeros(len(ids))
        length = zeros.index_add(0, index, torch.ones_like(log_ratio))
        sequence_ratio = bounded(zeros.index_add(0, index, log_ratio) / length).exp()
        advantage = zeros.index_add(0, index, tokens.advantage.to(zeros.dtype)) / length
        surrogate, metrics = clipped_surrogate(
            sequence_ratio, advantage, clip_low=self.clip_low, clip_high=self.clip_high
        )
        return -totals.per_sequence(surrogate), metrics
