"""Triton kernels of decoding on a GPU: a new key and value per row, and attention over its pages.

Pages that several rows share, those of a prompt with several samples, are read once for all of
them: one kernel attends to them for a tile of rows at a time, and the next one continues for each
row with the pages of its own.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_DOT = 16
"""rows that a tensor-core product has at least"""
TILE_QUERIES = 32
"""queries that a program for shared pages has, of all rows of its tile; more where a row has more"""
ROWS_PER_TILE_PROGRAM = 8
"""rows of the batch per program for shared pages: with smaller tiles a program has several"""
MAX_SPLITS = 16


class SharedPages(NamedTuple):
    """Tiles of rows that begin with the same pages; tensors that never move."""

    num_tiles: Tensor
    """[1]"""
    tile_rows: Tensor
    """[tiles, rows per tile], -1 where a tile has fewer"""
    tile_pages: Tensor
    """[tiles], how many pages its rows share"""
    row_pages: Tensor
    """[rows], the same for each row; 0 for rows of no tile"""


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
def _attend_to_pages(
    q,
    keys,
    values,
    pages,
    begin,
    end,
    length,
    head,
    largest,
    total,
    weighted,
    scale,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Continue a softmax over scores: its maximum, its sum, and the weighted sum of values."""
    dims, slots = tl.arange(0, D), tl.arange(0, PAGE)
    for number in range(begin, end):
        page = tl.load(pages + number).to(tl.int64)
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
    return largest, total, weighted


@triton.jit
def _attend_shared(
    query,
    keys,
    values,
    table,
    table_stride,
    num_tiles,
    tile_rows,
    tile_pages,
    parts,
    part_max,
    part_sum,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head, split = tl.program_id(1), tl.program_id(2)
    lanes, dims = tl.arange(0, PADDED), tl.arange(0, D)
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        num_pages = tl.load(tile_pages + tile)
        pages_each = (num_pages + SPLITS - 1) // SPLITS
        begin = split * pages_each
        end = tl.minimum(begin + pages_each, num_pages)
        if begin < end:
            members = tile_rows + tile * ROWS
            row = tl.load(members + lanes // GROUP, mask=lanes < ROWS * GROUP, other=-1)
            is_query = row >= 0
            row_head = row.to(tl.int64) * NUM_HEADS + head * GROUP + lanes % GROUP
            q = tl.load(
                query + row_head[:, None] * D + dims, mask=is_query[:, None], other=0.0
            )
            largest, total, weighted = _attend_to_pages(
                q,
                keys,
                values,
                table + tl.load(members).to(tl.int64) * table_stride,
                begin,
                end,
                end * PAGE,
                head,
                tl.full([PADDED], -float("inf"), tl.float32),
                tl.zeros([PADDED], tl.float32),
                tl.zeros([PADDED, D], tl.float32),
                scale,
                NUM_KV,
                D,
                PAGE,
            )
            part = row_head * SPLITS + split
            tl.store(parts + part[:, None] * D + dims, weighted, mask=is_query[:, None])
            tl.store(part_max + part, largest, mask=is_query)
            tl.store(part_sum + part, total, mask=is_query)


@triton.jit
def _attend(
    query,
    keys,
    values,
    table,
    table_stride,
    position,
    row_pages,
    shared,
    shared_max,
    shared_sum,
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
    SHARED_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(position + row) + 1
    num_pages = (length + PAGE - 1) // PAGE
    group, dims = tl.arange(0, PADDED), tl.arange(0, D)
    is_head = group < GROUP
    row_head = row * NUM_HEADS + head * GROUP + group
    q = tl.load(query + row_head[:, None] * D + dims, mask=is_head[:, None], other=0.0)
    largest = tl.full([PADDED], -float("inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    weighted = tl.zeros([PADDED, D], tl.float32)
    num_shared = 0
    if SHARED_SPLITS > 0:
        num_shared = tl.load(row_pages + row)
        shared_each = tl.maximum((num_shared + SHARED_SPLITS - 1) // SHARED_SPLITS, 1)
        num_parts = (num_shared + shared_each - 1) // shared_each
        for number in range(0, tl.where(split == 0, num_parts, 0)):
            part = row_head * SHARED_SPLITS + number
            found = tl.load(shared_max + part, mask=is_head, other=0.0)
            new_largest = tl.maximum(largest, found)
            shrink, factor = tl.exp(largest - new_largest), tl.exp(found - new_largest)
            found_sum = tl.load(shared_sum + part, mask=is_head, other=0.0)
            values_found = tl.load(
                shared + part[:, None] * D + dims, mask=is_head[:, None], other=0.0
            )
            total = total * shrink + found_sum * factor
            weighted = weighted * shrink[:, None] + values_found * factor[:, None]
            largest = new_largest
    pages_each = (num_pages - num_shared + SPLITS - 1) // SPLITS
    begin = num_shared + split * pages_each
    largest, total, weighted = _attend_to_pages(
        q,
        keys,
        values,
        table + row * table_stride,
        begin,
        tl.minimum(begin + pages_each, num_pages),
        length,
        head,
        largest,
        total,
        weighted,
        scale,
        NUM_KV,
        D,
        PAGE,
    )
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
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    table: Tensor,
    position: Tensor,
    num_processors: int,
    shared: SharedPages | None = None,
) -> Tensor:
    """Return attention [n, H, D] of one query per row over its pages, up to its own position.

    `shared` names the leading pages that several rows have in common. A row's pages are split among
    programs if there are too few rows for `num_processors`.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv, page = keys.shape[1:3]
    group = num_heads // num_kv
    sizes = {"NUM_HEADS": num_heads, "NUM_KV": num_kv, "GROUP": group, "D": head_dim, "PAGE": page}
    scale = head_dim**-0.5
    parts = (None, None, None)
    shared_splits = 0
    if shared is not None:
        num_programs = triton.cdiv(num_rows, ROWS_PER_TILE_PROGRAM)
        shared_splits = splits_for(num_programs, num_kv, num_processors)
        parts = _parts_of(query, shared_splits)
        rows = shared.tile_rows.shape[1]
        _attend_shared[(num_programs, num_kv, shared_splits)](
            query,
            keys,
            values,
            table,
            table.stride(0),
            *shared[:3],
            *parts,
            scale,
            ROWS=rows,
            PADDED=_padded(rows * group),
            SPLITS=shared_splits,
            **sizes,
            num_warps=4,
            num_stages=3,
        )
    splits = splits_for(num_rows, num_kv, num_processors)
    out = torch.empty_like(query)
    target, *statistics = (out, None, None) if splits == 1 else _parts_of(query, splits)
    _attend[(num_rows, num_kv, splits)](
        query,
        keys,
        values,
        table,
        table.stride(0),
        position,
        None if shared is None else shared.row_pages,
        *parts,
        target,
        *statistics,
        scale,
        PADDED=_padded(group),
        SPLITS=splits,
        SHARED_SPLITS=shared_splits,
        **sizes,
        num_warps=2,
        num_stages=3,
    )
    if splits > 1:
        _combine[(num_rows * num_heads,)](
            target, *statistics, out, SPLITS=splits, D=head_dim, num_warps=1
        )
    return out


def _parts_of(query: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the sums [n, H, splits, D] that splits find, their maxima and totals."""
    shape = (*query.shape[:2], splits)
    sums = torch.empty(*shape, query.shape[2], dtype=torch.float32, device=query.device)
    return sums, sums.new_empty(shape), sums.new_empty(shape)


def _padded(num_queries: int) -> int:
    return max(SMALLEST_DOT, triton.next_power_of_2(num_queries))


def rows_per_tile(group: int) -> int:
    """Return how many rows with `group` queries for each key head a tile has."""
    return max(TILE_QUERIES // group, 1)


def splits_for(num_rows: int, num_kv: int, num_processors: int) -> int:
    """Return the number of programs per row, for about two per multiprocessor."""
    splits = 1
    while splits < MAX_SPLITS and num_rows * num_kv * splits < 2 * num_processors:
        splits *= 2
    return splits
