"""Estimators of the objectives: bounded ratios, effective sample size and three KL estimates.

Notation, for a token sampled by the behavior policy pi_b: l = logp - behavior_logp, r = exp(l).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 60.0  # exp(60) = 1e26: its square still fits in float64, and 1e26 in float32
K3_LINEAR_BEYOND = 10.0
REST_FLOOR = 1e-6  # one minus a float32 sum of K probabilities is noise below this


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp the value of a log-ratio to [-60, 60], but keep its gradient everywhere.

    A plain clamp has no gradient outside its range, so a policy that has diverged could never be
    pulled back.
    """
    inside = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # the bracket is exactly 0 for terms of any size, and has the gradient of log_ratio
    return inside.detach() + (log_ratio - log_ratio.detach())


def sequence_sums(values: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Add up values [T] over each sequence, in float64.

    Returns the sums [S], and for each token [T] the index of its sequence's sum.
    """
    ids, place = torch.unique(sequence, return_inverse=True)
    zeros = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    return zeros.index_add(0, place, values.double()), place


@dataclass(frozen=True)
class RatioMoments:
    """Sums over tokens from which the effective sample size follows; they add over batches."""

    count: Tensor
    ratio_sum: Tensor
    ratio_square_sum: Tensor
    num_above: Tensor
    """tokens with l > 60: their ratio is too large to be measured"""
    num_below: Tensor
    """tokens with l < -60: indistinguishable from ratio 0"""

    @classmethod
    def of(cls, log_ratio: Tensor) -> "RatioMoments":
        """Sum over finite log-ratios [T], in float64."""
        log_ratio = log_ratio.detach().double()
        ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        return cls(
            count=torch.full_like(ratio.sum(), log_ratio.numel()),
            ratio_sum=ratio.sum(),
            ratio_square_sum=ratio.square().sum(),
            num_above=(log_ratio > LOG_RATIO_BOUND).sum().double(),
            num_below=(log_ratio < -LOG_RATIO_BOUND).sum().double(),
        )

    def to(self, device: torch.device) -> "RatioMoments":
        """Move every tensor."""
        return RatioMoments(
            count=self.count.to(device),
            ratio_sum=self.ratio_sum.to(device),
            ratio_square_sum=self.ratio_square_sum.to(device),
            num_above=self.num_above.to(device),
            num_below=self.num_below.to(device),
        )

    def __add__(self, other: "RatioMoments") -> "RatioMoments":
        return RatioMoments(
            count=self.count + other.count,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_square_sum=self.ratio_square_sum + other.ratio_square_sum,
            num_above=self.num_above + other.num_above,
            num_below=self.num_below + other.num_below,
        )


def effective_sample_size(moments: RatioMoments) -> Tensor:
    """Normalized effective sample size of the ratios, e = (sum r)^2 / (N sum r^2), in [1/N, 1].

    The paper's equation for ESS(B; theta). Two cases that cannot be measured, in which the formula
    would report too large a value, give the smallest possible value instead:

    - a ratio above exp(60), or every ratio below exp(-60): the bound makes unequal ratios equal,
      and equal ratios would read as e = 1. The answer is 1/N.
    - no token at all: the answer is 0.

    A single token gives 1 for any ratio, as the formula says.
    """
    count = moments.count.clamp(min=1.0)
    squares = moments.ratio_square_sum
    measured = moments.ratio_sum.square() / (count * torch.where(squares > 0, squares, 1.0))
    can_measure = (moments.num_above == 0) & (moments.num_below < moments.count)
    ess = torch.minimum(torch.maximum(measured, 1.0 / count), torch.ones_like(measured))
    ess = torch.where(can_measure, ess, 1.0 / count)
    return torch.where(moments.count > 0, ess, 0.0)


def kl_k3(x: Tensor) -> Tensor:
    """k3(x) = x + exp(-x) - 1 with x = log pi - log anchor, as a straight line beyond |x| = 10.

    Value and slope are continuous, so it stays finite and always has a restoring gradient. Under
    samples of pi it estimates KL(pi || anchor); under samples of another policy it is biased.
    """
    inside = x.clamp(-K3_LINEAR_BEYOND, K3_LINEAR_BEYOND)
    slope_at_edge = 1.0 - (-inside).exp()
    return inside + (-inside).exp() - 1.0 + slope_at_edge.detach() * (x - inside)


def kl_importance(log_ratio: Tensor, x: Tensor, anchor_log_ratio: Tensor) -> Tensor:
    """r (x - 1) + anchor / pi_b: an unbiased estimate of KL(pi || anchor) under samples of pi_b.

    Its gradient with respect to logp is r x: the ratio is not detached.

    Args:
        log_ratio: [T] l = log pi - log pi_b.
        x: [T] log pi - log anchor.
        anchor_log_ratio: [T] log anchor - log pi_b, without gradient; 0 where the anchor is pi_b.
    """
    return bounded(log_ratio).exp() * (bounded(x) - 1.0) + bounded(anchor_log_ratio).exp()


def kl_top_k(top_logp: Tensor, anchor_top_logp: Tensor) -> Tensor:
    """KL(pi || anchor) over the K given tokens and one bucket for all the others, [T].

    Exact when K is the vocabulary, otherwise a lower bound. A token outside the anchor's support
    (log-probability -inf, as top-p leaves it) is counted in the bucket. Bucket masses have a floor
    of 1e-6: below it, one minus a sum of K float32 probabilities is rounding noise.

    Args:
        top_logp: [T, K] the policy's log-probabilities, with gradient.
        anchor_top_logp: [T, K] the anchor's log-probabilities of the same tokens.
    """
    kept = torch.isfinite(anchor_top_logp)
    possible = kept & torch.isfinite(top_logp)  # a token the policy excludes adds 0 log 0 = 0
    policy = torch.where(possible, top_logp, 0.0)
    anchor = torch.where(kept, anchor_top_logp, 0.0)
    policy_mass = torch.where(possible, policy.exp(), 0.0)
    anchor_mass = torch.where(kept, anchor.exp(), 0.0)
    policy_rest = (1.0 - policy_mass.sum(-1)).clamp(min=REST_FLOOR)
    anchor_rest = (1.0 - anchor_mass.sum(-1)).clamp(min=REST_FLOOR)
    inside = (policy_mass * (policy - anchor)).sum(-1)
    return inside + policy_rest * (policy_rest.log() - anchor_rest.log())
