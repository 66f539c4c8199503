"""Rewards of graded groups as a tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trustbatch.types import RolloutGroup


def rewards_of(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the rewards [groups, samples] in float64, not a number where there is no grade."""
    rows = [[grade.reward for grade in group.grades] for group in groups]
    return torch.tensor(rows, dtype=torch.float64)
