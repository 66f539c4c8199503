"""The Triton kernel that adds adapters to the outputs of the frozen layers of one product.

Numbers are rounded where PEFT's layers round them under autocast: B (A x), its scaled value and the
sum are bfloat16.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trustbatch.rollout.native import operations

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128
"""columns of a tile; it must divide the outputs of each layer, so that a tile has one layer"""
LARGEST_ROWS = 64
MAX_LAYERS = 3
RANKS = 64
"""of the rank, in one product of a tile"""


@triton.jit
def _add_low_rank(
    outputs,
    outputs_stride,
    down,
    down_stride,
    up,
    added,
    num_rows,
    width,
    end_of_first,
    end_of_second,
    scale,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    layer = (first >= end_of_first).to(tl.int32) + (first >= end_of_second).to(tl.int32)
    inside = (row < num_rows) & (column < width)
    row = row.to(tl.int64)
    dtype = added.dtype.element_ty
    product = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    for start in range(0, RANK, BLOCK_RANK):
        k = start + tl.arange(0, BLOCK_RANK)
        a = tl.load(
            down + row * down_stride + layer * RANK + k[None, :],
            mask=(row < num_rows) & (k[None, :] < RANK),
            other=0.0,
        )
        b = tl.load(
            up + column * RANK + k[:, None],
            mask=(column < width) & (k[:, None] < RANK),
            other=0.0,
        )
        product += tl.dot(a, b, input_precision="ieee")
    scaled = (product.to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
    own = tl.load(outputs + row * outputs_stride + column, mask=inside, other=0.0)
    tl.store(added + row * width + column, (own.to(tl.float32) + scaled).to(dtype), mask=inside)


def add_low_rank(
    outputs: Tensor, down: Tensor, up: Tensor, sizes: Sequence[int], scale: float
) -> Tensor:
    """Return outputs [n, out] + scale * B (A x) of several layers with `sizes` outputs each.

    `down` [n, layers * rank] has the A x, `up` [out, rank] the B. Rows of the first two may be
    parts of longer ones; those of the result are not.
    """
    width, rank = up.shape
    block = math.gcd(LARGEST_BLOCK, *sizes) if len(sizes) > 1 else LARGEST_BLOCK
    if block < SMALLEST_BLOCK or len(sizes) > MAX_LAYERS:
        return operations.add_low_rank(outputs, down, up, sizes, scale)
    added = torch.empty(len(outputs), width, dtype=outputs.dtype, device=outputs.device)
    block_rows = min(max(triton.next_power_of_2(len(outputs)), SMALLEST_BLOCK), LARGEST_ROWS)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))] + [width] * MAX_LAYERS
    _add_low_rank[(triton.cdiv(len(outputs), block_rows), triton.cdiv(width, block))](
        outputs,
        outputs.stride(0),
        down,
        down.stride(0),
        up,
        added,
        len(outputs),
        width,
        ends[0],
        ends[1],
        scale,
        RANK=rank,
        BLOCK_RANK=min(max(triton.next_power_of_2(rank), SMALLEST_BLOCK), RANKS),
        BLOCK_ROWS=block_rows,
        BLOCK=block,
    )
    return added
