"""The input of every objective: the packed response tokens of any number of sequences."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

_WITH_GRADIENT = ("logp", "entropy", "top_logp")
_INTEGERS = ("sequence", "source")


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Packed response tokens; prompts and padding are never part of it.

    T is the number of tokens and K the number of most likely tokens that the engine recorded.
    All tokens of one sequence belong to the same TokenBatch: a batch is split between sequences.
    """

    logp: Tensor
    """[T] log-probability of each token under the policy being optimized; carries the gradient."""
    behavior_logp: Tensor
    """[T] log-probability of each token under the distribution that it was sampled from."""
    advantage: Tensor
    """[T] the advantage of the token's sequence."""
    sequence: Tensor
    """[T] integer id of the token's sequence, distinct within this batch."""
    proximal_logp: Tensor | None = None
    """[T] log-probability under the policy as it was at the start of the current pass."""
    reference_logp: Tensor | None = None
    """[T] log-probability under a frozen reference policy."""
    entropy: Tensor | None = None
    """[T] entropy of the policy at each position; carries gradient if the loss depends on it."""
    top_logp: Tensor | None = None
    """[T, K] policy's log-probabilities of the engine's K most likely tokens; carries gradient."""
    behavior_top_logp: Tensor | None = None
    """[T, K] the engine's own log-probabilities of those tokens."""
    anchor_logp: Tensor | None = None
    """[T] log-probability under the policy that sampled the token, before temperature, top-k and
    top-p, at the temperature of the policy being optimized; None: the same as `behavior_logp`."""
    anchor_top_logp: Tensor | None = None
    """[T, K] likewise of the engine's K most likely tokens."""
    source: Tensor | None = None
    """[T] integer id of the token's pair of policy and version, unique within the step."""
    proximal_top_logp: Tensor | None = None
    """[T, K] the proximal policy's log-probabilities of those tokens."""

    def __post_init__(self) -> None:
        if self.logp.dim() != 1:
            raise ValueError(f"TokenBatch.logp must have shape [T], not {list(self.logp.shape)}.")
        num_tokens = self.logp.shape[0]
        top_shapes = set()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name.endswith("top_logp"):
                top_shapes.add(tuple(value.shape))
                fits = value.dim() == 2 and value.shape[0] == num_tokens
                expected = f"[{num_tokens}, K]"
            else:
                fits = value.shape == self.logp.shape
                expected = f"[{num_tokens}]"
            if not fits:
                raise ValueError(
                    f"TokenBatch.{field.name} must have shape {expected}, not {list(value.shape)}."
                )
            is_integer = value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
            if not (is_integer if field.name in _INTEGERS else value.is_floating_point()):
                wanted = "integers" if field.name in _INTEGERS else "floating-point numbers"
                raise ValueError(f"TokenBatch.{field.name} must hold {wanted}, not {value.dtype}.")
        if len(top_shapes) > 1:
            raise ValueError(f"The top_logp fields must agree in K, not {sorted(top_shapes)}.")

    def __len__(self) -> int:
        return self.logp.shape[0]

    def select(self, index: Tensor) -> "TokenBatch":
        """Return the tokens selected by a boolean mask or an integer index, in that order.

        Only the policy's own fields keep their gradient: everything else is data.
        """
        # mostly all are selected: asking once saves a GPU many small kernels and waits for them
        is_everything = index.dtype == torch.bool and bool(index.all())
        picked: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                chosen = value if is_everything else value[index]
                has_gradient = field.name in _WITH_GRADIENT
                picked[field.name] = chosen if has_gradient else chosen.detach()
        return TokenBatch(**picked)

    def measurable(self, *others: Tensor | None) -> Tensor:
        """[T] bool: tokens whose log-prob is comparable with the behavior policy's and all others.

        Log-ratios must be finite; log-probs [T, K] may contain -inf: outside of the support.
        """
        finite = torch.isfinite(self.logp.detach() - self.behavior_logp)
        for other in others:
            if other is not None and other.dim() == 1:
                finite = finite & torch.isfinite(other)
            elif other is not None:
                finite = finite & ~other.isnan().any(dim=-1)
        return finite
