"""Ratios of some tokens of a batch apart from those of the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trustbatch.objectives import TokenBatch
from trustbatch.objectives.estimators import RatioMoments


@torch.no_grad()
def moments_of(tokens: TokenBatch, chosen: Tensor) -> RatioMoments:
    """Sum over the chosen tokens, [T] bool."""
    log_ratio = tokens.logp - tokens.behavior_logp
    return RatioMoments.of(log_ratio[chosen & tokens.measurable()])


def sampled_by(tokens: TokenBatch, policies: Sequence[str], policy: str) -> Tensor:
    """Return which tokens [T] a policy sampled; `policies` [B] says who sampled which sequence."""
    is_own = [each == policy for each in policies]
    return torch.tensor(is_own, dtype=torch.bool, device=tokens.logp.device)[tokens.sequence]
