"""Credit: from the rewards of a group of samples to one advantage a sample.

Every function takes rewards [groups, samples] and returns advantages of the same shape, in float64.
A group whose rewards are all equal says nothing about which sample was better: exactly zero. A
reward that is not a number was not given: its sample takes no part in the statistics of the group,
and its advantage is not a number either.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def group_standardised(rewards: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """A = (r - mean) / (std + epsilon) with the population standard deviation of the group.

    The paper's equation for the group-relative advantage.
    """
    rewards = _checked(rewards)
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    deviation = centred.square().nanmean(dim=1, keepdim=True).sqrt()
    return _zero_where_equal(rewards, centred / (deviation + epsilon))


def group_centred(rewards: Tensor) -> Tensor:
    """A = r - mean of the group."""
    rewards = _checked(rewards)
    return _zero_where_equal(rewards, rewards - rewards.nanmean(dim=1, keepdim=True))


def leave_one_out(rewards: Tensor) -> Tensor:
    """A = r - mean of the group's other rewards; zero in a group of one."""
    rewards = _checked(rewards)
    num_others = (~rewards.isnan()).sum(dim=1, keepdim=True).sub(1).clamp(min=1)
    others = (rewards.nansum(dim=1, keepdim=True) - rewards) / num_others
    return _zero_where_equal(rewards, rewards - others)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_standardised": group_standardised,
    "group_centred": group_centred,
    "leave_one_out": leave_one_out,
}


def _checked(rewards: Tensor) -> Tensor:
    if rewards.dim() != 2:
        raise ValueError(f"rewards must have shape [groups, samples], not {list(rewards.shape)}.")
    rewards = rewards.double()
    if torch.isinf(rewards).any():
        raise ValueError("rewards must be finite numbers: look at what the grader returns.")
    return rewards


def _zero_where_equal(rewards: Tensor, advantages: Tensor) -> Tensor:
    # the mean of equal numbers is not always that number, so the difference alone is not enough
    given = ~rewards.isnan()
    highest = rewards.masked_fill(~given, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.masked_fill(~given, torch.inf).amin(dim=1, keepdim=True)
    return torch.where((highest == lowest) & given, 0.0, advantages)
