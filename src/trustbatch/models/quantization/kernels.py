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
