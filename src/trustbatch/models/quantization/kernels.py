"""Triton kernels of quantized weights: de-quantized to memory, or inside a product of few rows.

Both round a weight as `Codes.dequantized` does, so all products have the same operands.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trustbatch.models.quantization.formats import Codes, nf4_levels

COLUMNS = 128
"""columns of a tile of `multiply`, which must divide those of the weight"""
OUTPUTS = 64
LARGEST_ROWS = 64
FEW_ROWS = 64
"""with more rows, `multiply` is slower than a product after `dequantize`"""
COLUMNS_AT_ONCE = 1024
"""of a row, in one program of `dequantize`"""
SMALLEST_DOT = 16
"""rows that a tensor-core product has at least"""


@triton.jit
def _level(code, levels, FORMAT: tl.constexpr):
    """Return the number that a byte or half a byte stands for."""
    if FORMAT == "nf4":
        return tl.load(levels + code.to(tl.int32))
    elif FORMAT == "int8":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _dequantize(
    codes, scales, levels, out, width, num_blocks, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    scale = tl.load(scales + row * num_blocks + column // BLOCK, mask=inside, other=0.0)
    if FORMAT == "nf4":
        code = tl.load(codes + row * (width // 2) + column // 2, mask=inside, other=0)
        code = (code >> (4 - 4 * (column % 2)).to(tl.uint8)) & 15
    else:
        code = tl.load(codes + row * width + column, mask=inside, other=0)
    weight = _level(code, levels, FORMAT) * scale
    tl.store(out + row * width + column, weight.to(out.dtype.element_ty), mask=inside)


def dequantize(weight: Codes, dtype: torch.dtype) -> Tensor:
    """Return a weight [out, in] on a GPU in a floating-point type."""
    rows, columns = len(weight.codes), weight.columns
    out = torch.empty(rows, columns, dtype=dtype, device=weight.codes.device)
    _dequantize[(rows, triton.cdiv(columns, COLUMNS_AT_ONCE))](
        weight.codes,
        weight.scales,
        nf4_levels(weight.codes.device),
        out,
        columns,
        weight.scales.shape[1],
        BLOCK=weight.format.block_of(columns),
        FORMAT=weight.format.name,
        SIZE=COLUMNS_AT_ONCE,
    )
    return out


@triton.jit
def _multiply(
    rows, codes, scales, levels, bias, out, num_rows, num_outputs, width, num_blocks,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum tiles of weight [OUTPUTS, COLUMNS] @ rows [COLUMNS, ROWS]."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_output, has_row = (output < num_outputs)[:, None], (row < num_rows)[None, :]
    output, row = output.to(tl.int64)[:, None], row.to(tl.int64)[None, :]
    dtype = rows.dtype.element_ty
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, width, COLUMNS):
        if FORMAT == "nf4":
            # two sums, over the even and the odd columns, since a byte has one of each
            half: tl.constexpr = COLUMNS // 2
            blocks: tl.constexpr = COLUMNS // BLOCK
            column = tl.arange(0, half)
            code = tl.load(
                codes + output * (width // 2) + (start // 2 + column)[None, :],
                mask=has_output,
                other=0,
            )
            scale = tl.load(
                scales + output * num_blocks + (start // BLOCK + tl.arange(0, blocks))[None, :],
                mask=has_output,
                other=0.0,
            )
            scale = tl.broadcast_to(scale[:, :, None], (OUTPUTS, blocks, BLOCK // 2))
            scale = tl.reshape(scale, (OUTPUTS, half))
            even = (_level(code >> 4, levels, FORMAT) * scale).to(dtype)
            odd = (_level(code & 15, levels, FORMAT) * scale).to(dtype)
            at = rows + row * width + (start + 2 * column)[:, None]
            total = tl.dot(even, tl.load(at, mask=has_row, other=0.0), total)
            total = tl.dot(odd, tl.load(at + 1, mask=has_row, other=0.0), total)
        else:
            column = start + tl.arange(0, COLUMNS)
            code = tl.load(codes + output * width + column[None, :], mask=has_output, other=0)
            scale = tl.load(
                scales + output * num_blocks + start // BLOCK, mask=has_output, other=0.0
            )
            weight = (_level(code, levels, FORMAT) * scale).to(dtype)
            part = tl.load(rows + row * width + column[:, None], mask=has_row, other=0.0)
            total = tl.dot(weight, part, total)
    if bias is not None:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + output, total.to(dtype), mask=has_output & has_row)


def multiplies(rows: Tensor, weight: Codes) -> bool:
    """Whether `multiply` is for these rows."""
    return rows.dtype == torch.bfloat16 and len(rows) <= FEW_ROWS and not weight.columns % COLUMNS


def multiply(rows: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
    """Return rows [n, in] @ weight.T [in, out] + bias, without a de-quantized copy."""
    num_outputs, columns = len(weight.codes), weight.columns
    out = rows.new_empty(len(rows), num_outputs)
    tile = min(max(triton.next_power_of_2(len(rows)), SMALLEST_DOT), LARGEST_ROWS)
    _multiply[(triton.cdiv(num_outputs, OUTPUTS), triton.cdiv(len(rows), tile))](
        rows.contiguous(),
        weight.codes,
        weight.scales,
        nf4_levels(rows.device),
        bias,
        out,
        len(rows),
        num_outputs,
        columns,
        weight.scales.shape[1],
        BLOCK=weight.format.block_of(columns),
        FORMAT=weight.format.name,
        ROWS=tile,
        OUTPUTS=OUTPUTS,
        COLUMNS=COLUMNS,
        num_warps=4,
        num_stages=4,
    )
    return out
