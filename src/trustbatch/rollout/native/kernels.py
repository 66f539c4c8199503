"""Triton kernels of decoding on a GPU: one kernel for all operations between matrix products.

Numbers are rounded where the trainer's forward pass rounds them (a product's output is bfloat16
under autocast, the residual stream float32), so that both compute the same function.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_DOT = 16
"""rows that a tensor-core product has at least"""
MAX_SPLITS = 16


@triton.jit
def _add_rms_norm(residual, delta, weight, normed, epsilon, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    offsets = row.to(tl.int64) * width + columns
    x = tl.load(residual + offsets, mask=inside, other=0.0)
    if delta is not None:
        x += tl.load(delta + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + offsets, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x) / width + epsilon)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + offsets, (w * (x * scale)).to(normed.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Add `delta` to the residual stream [n, h] in place, and return its norm in `dtype`."""
    num_rows, width = residual.shape
    normed = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(num_rows,)](
        residual, delta, weight, normed, epsilon, width, BLOCK=block, num_warps=_warps(block)
    )
    return normed


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    activated = (gate * tl.sigmoid(gate)).to(up.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + columns, product.to(up.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [n, 2 i], gate first."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    block = min(triton.next_power_of_2(width), 1024)
    _silu_mul[(num_rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


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
def _rotate_and_store(
    qkv,
    query,
    keys,
    values,
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
    slot = ((page * NUM_KV + kv) * PAGE + here % PAGE) * D + dims
    k = _rotated(source + kv * D, is_kv, dims, k_norm, epsilon, cos, sin, D)
    tl.store(keys + slot, k, mask=is_kv)
    v = tl.load(source + (NUM_KV + kv) * D + dims, mask=is_kv, other=0.0)
    tl.store(values + slot, v, mask=is_kv)


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rotary: tuple[Tensor, Tensor],
    position: Tensor,
    table: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    num_heads: int,
) -> Tensor:
    """Store one new key and value per row in its page; return the rotated queries [n, H, D].

    keys and values are one layer's pages [pages, KV heads, PAGE, D]; `norms` are the weights of
    the norms that some models have on queries and keys.
    """
    _, num_kv, page, head_dim = keys.shape
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    q_norm, k_norm = norms if norms is not None else (None, None)
    _rotate_and_store[(len(qkv),)](
        qkv,
        query,
        keys,
        values,
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


@triton.jit
def _attend(
    query,
    keys,
    values,
    table,
    table_stride,
    position,
    out,
    part_max,
    part_sum,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(position + row) + 1
    num_pages = (length + PAGE - 1) // PAGE
    pages_each = (num_pages + SPLITS - 1) // SPLITS
    begin = split * pages_each
    end = tl.minimum(begin + pages_each, num_pages)
    group, dims, slots = tl.arange(0, PADDED), tl.arange(0, D), tl.arange(0, PAGE)
    is_head = group < GROUP
    row_head = row * NUM_HEADS + head * GROUP + group
    q = tl.load(query + row_head[:, None] * D + dims, mask=is_head[:, None], other=0.0)
    largest = tl.full([PADDED], -float("inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    weighted = tl.zeros([PADDED, D], tl.float32)
    for number in range(begin, end):
        page = tl.load(table + row * table_stride + number).to(tl.int64)
        start = (page * NUM_KV + head) * PAGE * D
        inside = number * PAGE + slots < length
        # slots beyond the length hold anything, even NaN: no product may touch them
        k = tl.load(
            keys + start + slots[None, :] * D + dims[:, None], mask=inside[None, :], other=0.0
        )
        v = tl.load(values + start + slots[:, None] * D + dims, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + tl.dot(
            weights.to(v.dtype), v, input_precision="ieee"
        )
        largest = new_largest
    if SPLITS == 1:
        weighted = weighted / total[:, None]
        tl.store(
            out + row_head[:, None] * D + dims,
            weighted.to(out.dtype.element_ty),
            mask=is_head[:, None],
        )
    else:
        part = row_head * SPLITS + split
        tl.store(out + part[:, None] * D + dims, weighted, mask=is_head[:, None])
        tl.store(part_max + part, largest, mask=is_head)
        tl.store(part_sum + part, total, mask=is_head)


@triton.jit
def _combine(parts, part_max, part_sum, out, SPLITS: tl.constexpr, D: tl.constexpr):
    row_head = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, D)
    maxima = tl.load(part_max + row_head * SPLITS + splits)
    # a part without a page has maximum -inf and counts nothing
    shrink = tl.exp(maxima - tl.max(maxima))
    total = tl.sum(shrink * tl.load(part_sum + row_head * SPLITS + splits))
    weighted = tl.load(parts + (row_head * SPLITS + splits[:, None]) * D + dims)
    result = tl.sum(weighted * shrink[:, None], 0) / total
    tl.store(out + row_head * D + dims, result.to(out.dtype.element_ty))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, *, table: Tensor, position: Tensor, splits: int
) -> Tensor:
    """Return attention [n, H, D] of one query per row over its pages, up to its own position.

    A row's pages are split among `splits` programs, a power of two: with few rows, one program per
    row would leave most of the GPU idle.
    """
    num_rows, num_heads, head_dim = query.shape
    _, num_kv, page, _ = keys.shape
    group = num_heads // num_kv
    out = torch.empty_like(query)
    target, part_max, part_sum = out, None, None
    if splits > 1:
        shape = (num_rows, num_heads, splits)
        target = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        part_max, part_sum = (target.new_empty(shape) for _ in range(2))
    _attend[(num_rows, num_kv, splits)](
        query,
        keys,
        values,
        table,
        table.stride(0),
        position,
        target,
        part_max,
        part_sum,
        head_dim**-0.5,
        NUM_HEADS=num_heads,
        NUM_KV=num_kv,
        GROUP=group,
        PADDED=max(SMALLEST_DOT, triton.next_power_of_2(group)),
        D=head_dim,
        PAGE=page,
        SPLITS=splits,
        num_warps=2,
        num_stages=3,
    )
    if splits > 1:
        _combine[(num_rows * num_heads,)](
            target, part_max, part_sum, out, SPLITS=splits, D=head_dim, num_warps=1
        )
    return out


def splits_for(num_rows: int, num_kv: int, num_processors: int) -> int:
    """Return the number of programs per row, for about two per multiprocessor."""
    splits = 1
    while splits < MAX_SPLITS and num_rows * num_kv * splits < 2 * num_processors:
        splits *= 2
    return splits


@triton.jit
def _block_statistics(logits, maxima, sums, factor, row_stride, num_blocks, BLOCK: tl.constexpr,
                      BLOCKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    offsets = row * row_stride + blocks[:, None] * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + offsets, mask=inside[:, None], other=0.0).to(tl.float32) * factor
    largest = tl.max(x, 1)
    finite = tl.where(largest == -float("inf"), 0.0, largest)
    # a maximum skips NaN, a sum does not: it must reach the host
    total = tl.sum(tl.exp(x - finite[:, None]), 1)
    tl.store(maxima + row * num_blocks + blocks, largest, mask=inside)
    tl.store(sums + row * num_blocks + blocks, total, mask=inside)


def block_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return maxima of logits / temperature [B, n] over blocks [B, n, BLOCK], and sums of exp."""
    num_rows, num_blocks, block = logits.shape
    maxima = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    blocks_each = 32
    _block_statistics[(num_rows, triton.cdiv(num_blocks, blocks_each))](
        logits, maxima, sums, 1.0 / temperature, logits.stride(0), num_blocks,
        BLOCK=block, BLOCKS=blocks_each,
    )  # fmt: skip
    return maxima, sums


@triton.jit
def _quantize_tokens(rows, quantized, scales, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x))
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    rounded = tl.clamp(x / scale, -LARGEST, LARGEST).to(quantized.dtype.element_ty)
    tl.store(quantized + row * width + columns, rounded, mask=inside)
    tl.store(scales + row, scale)


def quantize_tokens(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, k] as e4m3 with their scales [n, 1], as `linear.quantize_rows` does."""
    num_rows, width = rows.shape
    quantized = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(width)
    largest = torch.finfo(torch.float8_e4m3fn).max
    _quantize_tokens[(num_rows,)](
        rows, quantized, scales, width, LARGEST=largest, BLOCK=block, num_warps=_warps(block)
    )
    return quantized, scales


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)
