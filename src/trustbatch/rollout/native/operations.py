"""What lies between two matrix products, in plain torch: for CPUs, and to check the kernels by."""

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
    return functional.rms_norm(residual, residual.shape[-1:], weight, epsilon).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [n, 2 i], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def split_and_rotate(
    qkv: Tensor, rotary: tuple[Tensor, Tensor], heads: Heads, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [n, (H + 2 KV) D] into query, key and value [n, heads, D]; rotate the first two.

    rotary: cosines and sines [n, D] of each token's position.
    """
    parts = qkv.view(len(qkv), heads.num_query + 2 * heads.num_kv, heads.dim)
    query, key, value = parts.split([heads.num_query, heads.num_kv, heads.num_kv], dim=1)
    if norms is not None:
        query = _rms_norm(query, heads.epsilon) * norms.query
        key = _rms_norm(key, heads.epsilon) * norms.key
    cosines, sines = (part[:, None] for part in rotary)
    query, key = (
        (part * cosines + _rotate_half(part) * sines).to(qkv.dtype) for part in (query, key)
    )
    return query, key, value


def _rms_norm(part: Tensor, epsilon: float) -> Tensor:
    # rounded before the weight is applied, as the models themselves do
    wide = part.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(part.dtype)


def _rotate_half(part: Tensor) -> Tensor:
    first, second = part.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
