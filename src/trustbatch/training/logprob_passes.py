"""Passes over a slice of logits between two matrix products, in plain torch.

A slice is [T, n]: all tokens, and n ids of the vocabulary starting at `first`. `logprob_kernels`
has the same two functions for a GPU.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

LOWEST_LOGP = -1e4
"""stands for -inf where a log-prob is multiplied by its probability: exp of either is 0"""


@dataclass
class SliceStatistics:
    """Running statistics of softmax(logits / temperature) of T tokens over the slices so far."""

    ids: Tensor
    """[T, J] int64: the tokens whose log-probs are computed"""
    picked: Tensor
    """[T, J] their logits over the temperature; NaN until their slice is added"""
    maximum: Tensor
    """[T] of the logits x"""
    total: Tensor
    """[T] sum of exp(x - maximum)"""
    weighted: Tensor | None
    """[T] sum of exp(x - maximum) (x - maximum), if the entropy is computed"""

    @classmethod
    def empty(cls, ids: Tensor, dtype: torch.dtype, *, with_entropy: bool) -> Self:
        """Return the statistics before the first slice."""
        zeros = torch.zeros(len(ids), dtype=dtype, device=ids.device)
        return cls(
            ids=ids,
            picked=torch.full(ids.shape, torch.nan, dtype=dtype, device=ids.device),
            # the lowest number instead of -inf, so that no difference below is -inf - -inf
            maximum=torch.full_like(zeros, torch.finfo(dtype).min),
            total=zeros,
            weighted=zeros.clone() if with_entropy else None,
        )

    def normalizer(self) -> Tensor:
        """Return logsumexp(x) [T]."""
        return self.maximum + self.total.log()

    def entropy(self) -> Tensor:
        """Return the entropy [T]."""
        assert self.weighted is not None
        return self.total.log() - self.weighted / self.total


@dataclass(frozen=True)
class OutputGradients:
    """The inputs of the backward pass for T tokens, besides their logits."""

    ids: Tensor
    """[T, J] int64"""
    logp: Tensor
    """[T, J] log-probs of the ids"""
    d_logp: Tensor
    """[T, J] gradient of the loss with respect to them"""
    normalizer: Tensor
    """[T]"""
    entropy: Tensor | None
    """[T], if the loss depends on it"""
    d_entropy: Tensor | None
    """[T]"""


def add_slice(
    statistics: SliceStatistics,
    logits: Tensor,
    bias: Tensor | None,
    *,
    first: int,
    temperature: float,
) -> None:
    """Add the slice [T, n] of the ids from `first` on; overwrites `logits`."""
    x = _scaled(logits, bias, temperature)
    inside, column = _columns(statistics.ids, first, x.shape[1])
    statistics.picked = torch.where(inside, x.gather(1, column), statistics.picked)
    maximum = torch.maximum(statistics.maximum, x.amax(-1))
    shift = statistics.maximum - maximum
    shrink = shift.exp()
    x.sub_(maximum[:, None])
    if statistics.weighted is None:
        statistics.total = statistics.total * shrink + x.exp_().sum(-1)
    else:
        weight = x.exp()
        statistics.weighted = (statistics.weighted + shift * statistics.total) * shrink
        statistics.total = statistics.total * shrink + weight.sum(-1)
        statistics.weighted += weight.mul_(_finite(x, bias)).sum(-1)
    statistics.maximum = maximum


def logit_gradients(
    outputs: OutputGradients,
    logits: Tensor,
    bias: Tensor | None,
    *,
    first: int,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient [T, n] in `dtype` with respect to a slice; overwrites `logits`.

    With x = logits / temperature and p = softmax(x), the gradient of a log-prob is onehot - p,
    and that of the entropy H is -p (log p + H).
    """
    log_p = _scaled(logits, bias, temperature).sub_(outputs.normalizer[:, None])
    gradient = log_p.exp()
    pull = outputs.d_logp.sum(-1, keepdim=True)
    if outputs.entropy is None or outputs.d_entropy is None:
        gradient.mul_(-pull)
    else:
        distance = _finite(log_p, bias).add_(outputs.entropy[:, None])
        gradient.mul_(distance.mul_(-outputs.d_entropy[:, None]).sub_(pull))
    inside, column = _columns(outputs.ids, first, gradient.shape[1])
    gradient.scatter_add_(1, column, torch.where(inside, outputs.d_logp, 0.0))
    if temperature != 1.0:
        gradient.div_(temperature)
    return gradient.to(dtype)


def _scaled(logits: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    if bias is not None:
        logits.add_(bias)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _columns(ids: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    column = ids - first
    return (column >= 0) & (column < width), column.clamp(0, width - 1)


def _finite(x: Tensor, bias: Tensor | None) -> Tensor:
    # a token that the bias excludes adds 0 to the entropy, not 0 * -inf
    return x if bias is None else x.clamp_(min=LOWEST_LOGP)
