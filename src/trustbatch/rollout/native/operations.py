"""Operations between matrix products, in plain torch: for CPUs, and as reference of the kernels."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.rollout.native.cache import HeadNorms, Heads


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Add `delta` to the residual stream [n, h] in place, and return its norm in `dtype`."""
    if delta is not None:
        residual += delta
    # functional.rms_norm computes the same in twice as many operations
    length = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
    mean_square = torch.addcmul(_constant(epsilon), length, length, value=1 / residual.shape[-1])
    return (residual * mean_square.rsqrt_()).mul_(weight).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [n, 2 i], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def add_low_rank(
    outputs: Tensor, down: Tensor, up: Tensor, sizes: Sequence[int], scale: float
) -> Tensor:
    """Return outputs [n, out] + scale * B (A x) of several layers with `sizes` outputs each.

    `down` [n, layers * rank] has the A x, `up` [out, rank] the B. Rounded as PEFT's layers do.
    """
    rank = up.shape[1]
    added = [
        functional.linear(part, of_layer)
        for part, of_layer in zip(down.split(rank, -1), up.split(list(sizes)), strict=True)
    ]
    return outputs + (added[0] if len(added) == 1 else torch.cat(added, -1)) * scale


def split_heads(qkv: Tensor, heads: Heads, norms: HeadNorms | None) -> Tensor:
    """Return [n, H + 2 KV, D], query, key and value heads, of [n, (H + 2 KV) D]."""
    parts = qkv.view(len(qkv), heads.num_query + 2 * heads.num_kv, heads.dim)
    if norms is None:
        return parts
    query, key, value = parts.split([heads.num_query, heads.num_kv, heads.num_kv], dim=1)
    query = _rms_norm(query, heads.epsilon) * norms.query
    key = _rms_norm(key, heads.epsilon) * norms.key
    return torch.cat([query, key, value], dim=1)


def rotate(part: Tensor, cosines: Tensor, sines: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate heads [n, heads, D] by the angles [n, heads or 1, D] of their positions."""
    half = part.shape[-1] // 2
    turned = part * cosines
    turned[..., :half].addcmul_(part[..., half:], sines[..., :half], value=-1)
    turned[..., half:].addcmul_(part[..., :half], sines[..., half:])
    return turned.to(dtype)


def _rms_norm(part: Tensor, epsilon: float) -> Tensor:
    # rounded before the weight is applied, as the models themselves do
    wide = part.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(part.dtype)


@cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
