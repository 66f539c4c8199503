"""Triton kernels of decoding on a GPU: attention of a row over its pages.

Pages that several rows share, those of a prompt with several samples, are read once for all of
them: one kernel attends to them for a tile of rows at a time, and the next one continues for each
row with the pages of its own.

FP8 keys and values are e4m3 with a scale for each token and head, so that the largest number of a
head is the largest e4m3 number. They are multiplied as float16, which holds every e4m3 number.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trustbatch.rollout.native.cache import LayerPages
from trustbatch.rollout.native.prompt_tiles import SharedPages
from trustbatch.rollout.native.store_kernels import E4M3_MAX

FEWEST_COLUMNS = 8
"""columns that a tensor-core product has at least"""
ROWS_PER_TILE_PROGRAM = 8
"""rows of the batch per program for shared pages: with smaller tiles a program has several"""
MAX_SPLITS = 16
FEWEST_PAIRS = 16
"""pairs of dimensions that a product of pairs needs"""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load_dims(heads, inside, D: tl.constexpr, PAIRS: tl.constexpr):
    """Load heads [D, n] that `heads` [1, n] points to; in pairs, even and odd dimensions."""
    if PAIRS:
        pairs = 2 * tl.arange(0, D // 2)[:, None]
        even = tl.load(heads + pairs, mask=inside, other=0.0)
        return even, tl.load(heads + pairs + 1, mask=inside, other=0.0)
    else:
        return tl.load(heads + tl.arange(0, D)[:, None], mask=inside, other=0.0), 0.0


@triton.jit
def _store_dims(heads, x, odd, inside, D: tl.constexpr, PAIRS: tl.constexpr):
    """Store what `_load_dims` would load."""
    if PAIRS:
        pairs = 2 * tl.arange(0, D // 2)[:, None]
        tl.store(heads + pairs, x.to(heads.dtype.element_ty), mask=inside)
        tl.store(heads + pairs + 1, odd.to(heads.dtype.element_ty), mask=inside)
    else:
        dims = tl.arange(0, D)[:, None]
        tl.store(heads + dims, x.to(heads.dtype.element_ty), mask=inside)


@triton.jit
def _no_sums(PADDED: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr):
    """Return weighted sums of no values [D, PADDED]; in pairs, of even and odd dimensions."""
    if PAIRS:
        empty = tl.zeros([D // 2, PADDED], tl.float32)
        return empty, empty
    else:
        return tl.zeros([D, PADDED], tl.float32), 0.0


@triton.jit
def _unpacked(pairs):
    """Return the low and the high bytes of int16 numbers, which are e4m3, as float16."""
    if INTERPRETED:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)
    else:
        # two pairs at a time: sort the bytes, then convert two bytes in one instruction
        return tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            constraints="=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _attend_to_pages(
    q,
    q_odd,
    keys,
    values,
    key_scales,
    value_scales,
    pages,
    begin,
    end,
    length,
    head,
    largest,
    total,
    sums,
    odd_sums,
    scale,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Continue a softmax over scores: its maximum, its sum, and the weighted sums of values.

    Queries, scores and sums are columns: there are few of them, and a product has at least eight
    columns but sixteen rows. STEP tokens are read at a time.

    With PAIRS, two e4m3 numbers are one int16: tensor cores take the tokens of a page as they lie
    in memory if a number has two bytes, and else every byte is moved by itself.
    """
    WIDTH: tl.constexpr = D // 2 if PAIRS else D
    STEPS: tl.constexpr = PAGE // STEP
    if key_scales is not None:
        q = q.to(tl.float16)
    if PAIRS:
        q_odd = q_odd.to(tl.float16)
    dims, slots = tl.arange(0, WIDTH), tl.arange(0, STEP)
    last = tl.minimum(end * STEPS, (length + STEP - 1) // STEP)
    for number in range(begin * STEPS, last):
        page = tl.load(pages + number // STEPS).to(tl.int64)
        slot = (page * NUM_KV + head) * PAGE + (number % STEPS) * STEP
        is_token = number * STEP + slots < length
        inside = is_token[:, None]
        # slots beyond the length hold anything, even NaN: no product may touch them
        at = slot * WIDTH + slots[:, None] * WIDTH + dims
        k = tl.load(keys + at, mask=inside, other=0)
        v = tl.load(values + at, mask=inside, other=0)
        factors = tl.where(is_token, scale, 0.0)
        if key_scales is not None:
            factors *= tl.load(key_scales + slot + slots, mask=is_token, other=0.0)
        if PAIRS:
            k_even, k_odd = _unpacked(k)
            scores = tl.dot(k_odd, q_odd, acc=tl.dot(k_even, q))
        else:
            scores = tl.dot(k.to(q.dtype), q, input_precision="ieee")
        scores = tl.where(inside, scores * factors[:, None], -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[None, :])
        total = total * shrink + tl.sum(weights, 0)
        if value_scales is not None:
            # times the largest value rather than the scale: float16 has no smaller numbers
            factors = tl.load(value_scales + slot + slots, mask=is_token, other=0.0) * E4M3_MAX
            weights *= factors[:, None]
        weights = weights.to(q.dtype)
        sums *= shrink[None, :]
        if PAIRS:
            v_even, v_odd = _unpacked(v)
            odd_sums *= shrink[None, :]
            sums = tl.dot(tl.trans(v_even), weights, acc=sums)
            odd_sums = tl.dot(tl.trans(v_odd), weights, acc=odd_sums)
        else:
            values_of = tl.trans(v.to(q.dtype))
            sums = tl.dot(values_of, weights, acc=sums, input_precision="ieee")
        largest = new_largest
    return largest, total, sums, odd_sums


@triton.jit
def _attend_shared(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    table_stride,
    num_tiles,
    tile_rows,
    tile_pages,
    parts,
    part_max,
    part_total,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    head, split = tl.program_id(1), tl.program_id(2)
    lanes = tl.arange(0, PADDED)
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
            inside = is_query[None, :]
            q, q_odd = _load_dims(query + row_head[None, :] * D, inside, D, PAIRS)
            sums, odd_sums = _no_sums(PADDED, D, PAIRS)
            largest, total, sums, odd_sums = _attend_to_pages(
                q,
                q_odd,
                keys,
                values,
                key_scales,
                value_scales,
                table + tl.load(members).to(tl.int64) * table_stride,
                begin,
                end,
                end * PAGE,
                head,
                tl.full([PADDED], -float("inf"), tl.float32),
                tl.zeros([PADDED], tl.float32),
                sums,
                odd_sums,
                scale,
                NUM_KV,
                D,
                PAGE,
                STEP,
                PAIRS,
            )
            part = row_head * SPLITS + split
            _store_dims(parts + part[None, :] * D, sums, odd_sums, inside, D, PAIRS)
            tl.store(part_max + part, largest, mask=is_query)
            tl.store(part_total + part, total, mask=is_query)


@triton.jit
def _add_shared(
    num_shared,
    split,
    row_head,
    is_head,
    shared,
    shared_max,
    shared_total,
    largest,
    total,
    sums,
    odd_sums,
    D: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Continue a softmax, that of a row's first split, with what was found in shared pages."""
    pages_each = tl.maximum((num_shared + SHARED_SPLITS - 1) // SHARED_SPLITS, 1)
    num_parts = (num_shared + pages_each - 1) // pages_each
    for number in range(0, tl.where(split == 0, num_parts, 0)):
        part = row_head * SHARED_SPLITS + number
        found = tl.load(shared_max + part, mask=is_head, other=0.0)
        found_total = tl.load(shared_total + part, mask=is_head, other=0.0)
        found_sums, found_odd = _load_dims(shared + part[None, :] * D, is_head[None, :], D, PAIRS)
        new_largest = tl.maximum(largest, found)
        shrink, factor = tl.exp(largest - new_largest), tl.exp(found - new_largest)
        total = total * shrink + found_total * factor
        sums = sums * shrink[None, :] + found_sums * factor[None, :]
        if PAIRS:
            odd_sums = odd_sums * shrink[None, :] + found_odd * factor[None, :]
        largest = new_largest
    return largest, total, sums, odd_sums


@triton.jit
def _attend(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    table_stride,
    position,
    row_pages,
    shared,
    shared_max,
    shared_total,
    out,
    part_max,
    part_total,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(position + row) + 1
    num_pages = (length + PAGE - 1) // PAGE
    group = tl.arange(0, PADDED)
    is_head = group < GROUP
    inside = is_head[None, :]
    row_head = row * NUM_HEADS + head * GROUP + group
    q, q_odd = _load_dims(query + row_head[None, :] * D, inside, D, PAIRS)
    largest = tl.full([PADDED], -float("inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    sums, odd_sums = _no_sums(PADDED, D, PAIRS)
    num_shared = 0
    if SHARED_SPLITS > 0:
        num_shared = tl.load(row_pages + row)
        largest, total, sums, odd_sums = _add_shared(
            num_shared, split, row_head, is_head, shared, shared_max, shared_total,
            largest, total, sums, odd_sums, D, SHARED_SPLITS, PAIRS,
        )  # fmt: skip
    pages_each = (num_pages - num_shared + SPLITS - 1) // SPLITS
    begin = num_shared + split * pages_each
    end = tl.minimum(begin + pages_each, num_pages)
    largest, total, sums, odd_sums = _attend_to_pages(
        q, q_odd, keys, values, key_scales, value_scales, table + row * table_stride,
        begin, end, length, head, largest, total, sums, odd_sums,
        scale, NUM_KV, D, PAGE, STEP, PAIRS,
    )  # fmt: skip
    factor = tl.full([1, PADDED], 1.0, tl.float32)
    if value_scales is not None:
        factor /= E4M3_MAX
    if SPLITS == 1:
        factor /= total[None, :]
        part = row_head
    else:
        part = row_head * SPLITS + split
        tl.store(part_max + part, largest, mask=is_head)
        tl.store(part_total + part, total, mask=is_head)
    _store_dims(out + part[None, :] * D, sums * factor, odd_sums * factor, inside, D, PAIRS)


@triton.jit
def _combine(parts, part_max, part_total, out, SPLITS: tl.constexpr, D: tl.constexpr):
    row_head = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, D)
    maxima = tl.load(part_max + row_head * SPLITS + splits)
    # a part without a page has maximum -inf and counts nothing
    shrink = tl.exp(maxima - tl.max(maxima))
    total = tl.sum(shrink * tl.load(part_total + row_head * SPLITS + splits))
    weighted = tl.load(parts + (row_head * SPLITS + splits[:, None]) * D + dims)
    result = tl.sum(weighted * shrink[:, None], 0) / total
    tl.store(out + row_head * D + dims, result.to(out.dtype.element_ty))


def attend(
    query: Tensor,
    pages: LayerPages,
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
    num_kv, page = pages.keys.shape[1:3]
    group = num_heads // num_kv
    in_pairs = pages.is_fp8 and head_dim >= 2 * FEWEST_PAIRS
    keys, values = pages.keys, pages.values
    if pages.is_fp8:
        byte_pairs = torch.int16 if in_pairs else torch.float8_e4m3fn
        keys, values = keys.view(byte_pairs), values.view(byte_pairs)
    sources = (query, keys, values, pages.key_scales, pages.value_scales, table, table.stride(0))
    sizes = {"NUM_HEADS": num_heads, "NUM_KV": num_kv, "GROUP": group, "D": head_dim, "PAGE": page}
    sizes["PAIRS"] = in_pairs
    scale = head_dim**-0.5
    parts = (None, None, None)
    shared_splits = 0
    if shared is not None:
        num_programs = triton.cdiv(num_rows, ROWS_PER_TILE_PROGRAM)
        shared_splits = splits_for(num_programs, num_kv, num_processors)
        parts = _parts_of(query, shared_splits)
        rows = shared.tile_rows.shape[1]
        _attend_shared[(num_programs, num_kv, shared_splits)](
            *sources,
            *shared[:3],
            *parts,
            scale,
            ROWS=rows,
            PADDED=_padded(rows * group),
            STEP=page,
            SPLITS=shared_splits,
            **sizes,
            num_warps=2,
            num_stages=3,
        )
    splits = splits_for(num_rows, num_kv, num_processors)
    out = torch.empty_like(query)
    target, *statistics = (out, None, None) if splits == 1 else _parts_of(query, splits)
    _attend[(num_rows, num_kv, splits)](
        *sources,
        position,
        None if shared is None else shared.row_pages,
        *parts,
        target,
        *statistics,
        scale,
        PADDED=_padded(group),
        SPLITS=splits,
        SHARED_SPLITS=shared_splits,
        STEP=page // 2,
        **sizes,
        # FP8 takes more instructions than memory: small programs leave room for more of them
        num_warps=1 if pages.is_fp8 else 2,
        num_stages=3 if pages.is_fp8 else 2,
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
    return max(FEWEST_COLUMNS, triton.next_power_of_2(num_queries))


def splits_for(num_rows: int, num_kv: int, num_processors: int) -> int:
    """Return the number of programs per row, for about two per multiprocessor."""
    splits = 1
    while splits < MAX_SPLITS and num_rows * num_kv * splits < 2 * num_processors:
        splits *= 2
    return splits
