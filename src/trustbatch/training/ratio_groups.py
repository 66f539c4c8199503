"""Ratios of some sequences of a batch apart from those of the others."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from trustbatch.objectives import TokenBatch
from trustbatch.objectives.estimators import RatioMoments

Label = TypeVar("Label", str, int)


@torch.no_grad()
def moments_by_label(
    tokens: TokenBatch, labels: Sequence[Label | None]
) -> dict[Label, RatioMoments]:
    """Sum over the tokens of each label; `labels` [B] has one a sequence, None leaves it out."""
    log_ratio = tokens.logp - tokens.behaviour_logp
    measurable = tokens.measurable()
    moments: dict[Label, RatioMoments] = {}
    for label in dict.fromkeys(labels):
        if label is not None:
            is_own = torch.tensor([each == label for each in labels], device=log_ratio.device)
            moments[label] = RatioMoments.of(log_ratio[is_own[tokens.sequence] & measurable])
    return moments
