"""The Triton kernel of decoding that rotates a new token's heads and stores its key and value."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trustbatch.rollout.native.cache import LayerPages

E4M3_MAX = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


@triton.jit
def _rotated(heads, inside, dims, norm, epsilon, cos, sin, D: tl.constexpr):
    """Norm and rotate heads [n, D] that `heads` points to; `cos`, `sin` are at their position."""
    half: tl.constexpr = D // 2
    partners = (dims + half) % D
    x = tl.load(heads + dims, mask=inside, other=0.0)
    partner = tl.load(heads + partners, mask=inside, other=0.0)
    a, b = x.to(tl.float32), partner.to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(a * a, 1) / D + epsilon)[:, None]
        a = (a * scale).to(x.dtype).to(tl.float32) * tl.load(norm + dims)
        b = (b * scale).to(x.dtype).to(tl.float32) * tl.load(norm + partners)
    b = tl.where(dims < half, -b, b)
    return (a * tl.load(cos + dims) + b * tl.load(sin + dims)).to(x.dtype)


@triton.jit
def _store_heads(x, pool, scales, slot, inside, D: tl.constexpr):
    """Store heads [n, D] at `slot` [n, 1], as e4m3 if there are scales."""
    if scales is not None:
        wide = x.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)[:, None]
        scale = tl.where(largest > 0, largest / E4M3_MAX, 1.0)
        tl.store(scales + slot, scale, mask=inside)
        x = tl.clamp(wide / scale, -E4M3_MAX, E4M3_MAX)
    dims = tl.arange(0, D)[None, :]
    tl.store(pool + slot * D + dims, x.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    cosines,
    sines,
    position,
    table,
    table_stride,
    q_norm,
    k_norm,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    here = tl.load(position + row)
    page = tl.load(table + row * table_stride + here // PAGE).to(tl.int64)
    dims = tl.arange(0, D)[None, :]
    head, kv = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_KV)[:, None]
    is_head, is_kv = head < NUM_HEADS, kv < NUM_KV
    source = qkv + row * (NUM_HEADS + 2 * NUM_KV) * D
    cos, sin = cosines + here * D, sines + here * D
    q = _rotated(source + head * D, is_head, dims, q_norm, epsilon, cos, sin, D)
    tl.store(query + (row * NUM_HEADS + head) * D + dims, q, mask=is_head)
    source += NUM_HEADS * D
    slot = (page * NUM_KV + kv) * PAGE + here % PAGE
    k = _rotated(source + kv * D, is_kv, dims, k_norm, epsilon, cos, sin, D)
    _store_heads(k, keys, key_scales, slot, is_kv, D)
    v = tl.load(source + (NUM_KV + kv) * D + dims, mask=is_kv, other=0.0)
    _store_heads(v, values, value_scales, slot, is_kv, D)


def rotate_and_store(
    qkv: Tensor,
    pages: LayerPages,
    *,
    rotary: tuple[Tensor, Tensor],
    position: Tensor,
    table: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    num_heads: int,
) -> Tensor:
    """Store one new key and value per row in its page; return the rotated queries [n, H, D].

    `norms` are the weights of the norms that some models have on queries and keys.
    """
    _, num_kv, page, head_dim = pages.keys.shape
    keys, values = pages.keys, pages.values
    if pages.is_fp8:
        keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    q_norm, k_norm = norms if norms is not None else (None, None)
    _rotate_and_store[(len(qkv),)](
        qkv,
        query,
        keys,
        values,
        pages.key_scales,
        pages.value_scales,
        *rotary,
        position,
        table,
        table.stride(0),
        q_norm,
        k_norm,
        epsilon,
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_KV=triton.next_power_of_2(num_kv),
        D=head_dim,
        PAGE=page,
        num_warps=4,
    )
    return query
