"""Credit: from the rewards of a group of samples to one advantage a sample.

Every function takes rewards [groups, samples] and returns advantages of the same shape, in float64.
A group whose rewards are all equal says nothing about which sample was better: exactly zero. A
reward that is not a number was not given: its sample takes no part in the statistics of the group,
and its advantage is not a number either.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor


def group_standardized(rewards: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """A = (r - mean) / (std + epsilon) with the population standard deviation of the group.

    The paper's equation for the group-relative advantage.
    """
    _require_positive("epsilon", epsilon)
    rewards = _checked(rewards)
    centered = rewards - rewards.nanmean(dim=1, keepdim=True)
    return _zero_where_equal(rewards, centered / (_deviation(rewards) + epsilon))


def group_centered(rewards: Tensor) -> Tensor:
    """A = r - mean of the group."""
    rewards = _checked(rewards)
    return _zero_where_equal(rewards, rewards - rewards.nanmean(dim=1, keepdim=True))


def leave_one_out(rewards: Tensor) -> Tensor:
    """A = r - mean of the group's other rewards; zero in a group of one."""
    rewards = _checked(rewards)
    num_others = (~rewards.isnan()).sum(dim=1, keepdim=True).sub(1).clamp(min=1)
    others = (rewards.nansum(dim=1, keepdim=True) - rewards) / num_others
    return _zero_where_equal(rewards, rewards - others)


def group_quantile(rewards: Tensor, *, quantile: float = 0.4, epsilon: float = 1e-6) -> Tensor:
    """A = (r - q) / (std + epsilon) with the quantile q of the group in place of its mean.

    Quantile advantage estimation (QAE, arXiv 2509.22611). q is the lowest reward that at least the
    share `quantile` of the group does not exceed. So of rewards 0 and 1 with a pass rate of at most
    1 - quantile only the right samples have an advantage, above that only the wrong ones. std is
    about the mean, as in `group_standardized`. QAE's code interpolates between two rewards, which
    gives a part of the advantage to both kinds where q lies between them; this does not.
    """
    _require_positive("epsilon", epsilon)
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must be between 0 and 1, not {quantile:g}.")
    rewards = _checked(rewards)
    share = Fraction(str(quantile))  # as written: 0.07 * 100 is above 7 in floating point
    # the sample at position ceil(share * n) of n in ascending order; those not given stand behind
    ranks = [max(math.ceil(share * n), 1) for n in (~rewards.isnan()).sum(dim=1).tolist()]
    ascending = rewards.nan_to_num(nan=torch.inf).sort(dim=1).values
    baseline = ascending.gather(1, torch.tensor(ranks, device=rewards.device)[:, None] - 1)
    return _zero_where_equal(rewards, (rewards - baseline) / (_deviation(rewards) + epsilon))


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_standardized": group_standardized,
    "group_centered": group_centered,
    "leave_one_out": leave_one_out,
    "group_quantile": group_quantile,
}


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, not {value!r}.")


def _checked(rewards: Tensor) -> Tensor:
    if rewards.dim() != 2:
        raise ValueError(f"rewards must have shape [groups, samples], not {list(rewards.shape)}.")
    rewards = rewards.double()
    if torch.isinf(rewards).any():
        raise ValueError("rewards must be finite numbers: look at what the grader returns.")
    return rewards


def _deviation(rewards: Tensor) -> Tensor:
    """Return the population standard deviation of each group [groups, 1]."""
    centered = rewards - rewards.nanmean(dim=1, keepdim=True)
    return centered.square().nanmean(dim=1, keepdim=True).sqrt()


def _zero_where_equal(rewards: Tensor, advantages: Tensor) -> Tensor:
    # the mean of equal numbers is not always that number, so the difference alone is not enough
    given = ~rewards.isnan()
    highest = rewards.masked_fill(~given, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.masked_fill(~given, torch.inf).amin(dim=1, keepdim=True)
    return torch.where((highest == lowest) & given, 0.0, advantages)
