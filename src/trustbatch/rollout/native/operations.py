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

    rotary: cosines and sines of each token's position, [n, 1, D], or [n, H + KV, D] where the heads
    are scaled too.
    """
    num_rotated = heads.num_query + heads.num_kv
    parts = qkv.view(len(qkv), num_rotated + heads.num_kv, heads.dim)
    rotated, value = parts[:, :num_rotated], parts[:, num_rotated:]
    if norms is not None:
        normed = _rms_norm(rotated, heads.epsilon)
        query, key = normed[:, : heads.num_query], normed[:, heads.num_query :]
        rotated = torch.cat([query * norms.query, key * norms.key], dim=1)
    cosines, sines = rotary
    rotated = (rotated * cosines).addcmul_(_rotate_half(rotated), sines).to(qkv.dtype)
    return rotated[:, : heads.num_query], rotated[:, heads.num_query :], value


def _rms_norm(part: Tensor, epsilon: float) -> Tensor:
    # rounded before the weight is applied, as the models themselves do
    wide = part.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(part.dtype)


def _rotate_half(part: Tensor) -> Tensor:
    first, second = part.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
