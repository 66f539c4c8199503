"""Triton kernels of quantized weights: de-quantized to memory, or inside a product of few rows.

Both have the numbers of `Codes.dequantized` on a CPU, so that all products have the same operands.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trustbatch.models.quantization.formats import NF4_BLOCK, NF4_LEVELS, Codes, nf4_levels
from trustbatch.models.quantization.tiles import (
    SMALLEST_DOT,
    Tile,
    num_processors,
    num_splits,
    tile_for,
)

BYTES_AT_ONCE = 1024
"""of a row, in one program of `dequantize`"""
OUTPUTS_AT_ONCE = 512
"""of a row, in one program of `_add_splits`"""
LARGEST_ROWS = 64
FEW_ROWS = 64
"""with more rows, `multiply` is slower than a product after `dequantize`"""
_HALF: tl.constexpr = tl.constexpr(NF4_BLOCK // 2)


def _nf4_assembly() -> str:
    """Return PTX that looks up 8 levels in bfloat16 and scales them, without reading memory.

    A `prmt` takes 4 of 8 bytes by the lower bits of as many codes: from the lower and from the
    upper half of the levels, of which a third one takes what the codes' highest bits say. This is
    done for the high and for the low bytes of levels. One multiplication scales two of them.
    """
    bits = torch.tensor(NF4_LEVELS).bfloat16().view(torch.int16).tolist()
    tables = {
        name: [
            sum(((bits[4 * word + i] >> shift) & 255) << (8 * i) for i in range(4))
            for word in range(4)
        ]
        for name, shift in (("high", 8), ("low", 0))
    }
    lines = [
        ".reg .b32 code, which, a, b, high, low, zero;",
        "mov.b32 zero, 0x80008000;",  # -0, which a sum leaves as it is
        "and.b32 code, $4, 0x77777777;",
        "shr.b32 which, $4, 1;",
        "and.b32 which, which, 0x44444444;",
        "or.b32 which, which, 0x32103210;",
    ]
    for first, second, scale in (("$0", "$2", "$5"), ("$1", "$3", "$6")):
        for name, (w0, w1, w2, w3) in tables.items():
            lines += [
                f"prmt.b32 a, {w0:#x}, {w1:#x}, code;",
                f"prmt.b32 b, {w2:#x}, {w3:#x}, code;",
                f"prmt.b32 {name}, a, b, which;",
            ]
        lines += [
            f"prmt.b32 {second}, low, high, 0x6240;",
            f"prmt.b32 {first}, low, high, 0x7351;",
            f"fma.rn.bf16x2 {first}, {first}, {scale}, zero;",
            f"fma.rn.bf16x2 {second}, {second}, {scale}, zero;",
            "shr.b32 code, code, 16;",
            "shr.b32 which, which, 16;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_NF4_ASSEMBLY: tl.constexpr = tl.constexpr(_nf4_assembly())


@triton.jit
def _scaled(level, scale, dtype: tl.constexpr):
    """Return level * scale, of which each is rounded to the type, and the product again."""
    return (level.to(dtype).to(tl.float32) * scale.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _byte_level(code, FORMAT: tl.constexpr):
    """Return the number that a byte stands for."""
    if FORMAT == "fp8":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # an integer below 2^23 in the digits of 2^23, which is much faster than a conversion
    return ((code ^ 128).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _halves(code, scale, levels, dtype: tl.constexpr):
    """Return the weights of the high and of the low halves of bytes."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _NF4_ASSEMBLY,
            "=&r,=&r,=&r,=&r,r,r,r",
            [code, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        first = _scaled(tl.load(levels + (code >> 4).to(tl.int32)), scale, dtype)
        return first, _scaled(tl.load(levels + (code & 15).to(tl.int32)), scale, dtype)


@triton.jit
def _dequantize(
    codes, scales, levels, out, width, num_bytes, num_blocks,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    has_byte = at < num_bytes
    code = tl.load(codes + row * num_bytes + at, mask=has_byte, other=0)
    dtype = out.dtype.element_ty
    own = out + row * width
    if FORMAT == "nf4":
        block = at // _HALF
        scale = tl.load(scales + row * num_blocks + block, mask=has_byte, other=0.0)
        first, second = _halves(code, scale, levels, dtype)
        column = block * BLOCK + at % _HALF
        tl.store(own + column, first, mask=column < width)
        tl.store(own + column + _HALF, second, mask=column + _HALF < width)
    else:
        scale = tl.load(scales + row * num_blocks + at // BLOCK, mask=has_byte, other=0.0)
        tl.store(own + at, _scaled(_byte_level(code, FORMAT), scale, dtype), mask=has_byte)


def _levels(weight: Codes, dtype: torch.dtype) -> Tensor | None:
    """Return the table of levels where a kernel reads one from memory."""
    has_table = weight.format.name == "nf4" and dtype != torch.bfloat16
    return nf4_levels(weight.codes.device) if has_table else None


def dequantize(weight: Codes, dtype: torch.dtype) -> Tensor:
    """Return a weight [out, in] on a GPU in a floating-point type."""
    rows, num_bytes = weight.codes.shape
    out = torch.empty(rows, weight.columns, dtype=dtype, device=weight.codes.device)
    _dequantize[(rows, triton.cdiv(num_bytes, BYTES_AT_ONCE))](
        weight.codes,
        weight.scales,
        _levels(weight, dtype),
        out,
        weight.columns,
        num_bytes,
        weight.scales.shape[1],
        BLOCK=weight.format.block_of(weight.columns),
        FORMAT=weight.format.name,
        SIZE=BYTES_AT_ONCE,
    )
    return out


@triton.jit
def _multiply(
    rows, codes, scales, levels, bias, out, num_rows, num_outputs, width, num_blocks,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum products of tiles: weights [OUTPUTS, COLUMNS] @ rows [COLUMNS, ROWS].

    Of several splits, each has a share of the columns and a matrix of `out` for its sums.
    """
    split, share = tl.program_id(2), tl.cdiv(tl.cdiv(width, COLUMNS), tl.num_programs(2))
    begin = split * share * COLUMNS
    end = tl.minimum(begin + share * COLUMNS, width)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_output, has_row = (output < num_outputs)[:, None], (row < num_rows)[None, :]
    output, row = output.to(tl.int64)[:, None], row.to(tl.int64)[None, :]
    dtype = rows.dtype.element_ty
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(begin, end, COLUMNS):
        own_scales = scales + output * num_blocks + start // BLOCK
        if FORMAT == "nf4":
            blocks: tl.constexpr = COLUMNS // BLOCK
            at = tl.arange(0, COLUMNS // 2)
            # a multiple of 32 to the compiler, unlike half of the width: reads of 16 bytes
            own_codes = codes + output * (num_blocks * _HALF) + start // 2
            code = tl.load(own_codes + at[None, :], mask=has_output, other=0)
            scale = tl.load(own_scales + tl.arange(0, blocks)[None, :], mask=has_output, other=0.0)
            scale = tl.broadcast_to(scale[:, :, None], (OUTPUTS, blocks, _HALF))
            scale = tl.reshape(scale, (OUTPUTS, COLUMNS // 2))
            first, second = _halves(code, scale, levels, dtype)
            column = start + at // _HALF * BLOCK + at % _HALF
            part = rows + row * width + column[:, None]
            total = tl.dot(first, tl.load(part, mask=has_row, other=0.0), total)
            total = tl.dot(second, tl.load(part + _HALF, mask=has_row, other=0.0), total)
        else:
            column = start + tl.arange(0, COLUMNS)
            code = tl.load(codes + output * width + column[None, :], mask=has_output, other=0)
            scale = tl.load(own_scales, mask=has_output, other=0.0)
            part = tl.load(rows + row * width + column[:, None], mask=has_row, other=0.0)
            total = tl.dot(_scaled(_byte_level(code, FORMAT), scale, dtype), part, total)
    if bias is not None:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)
    own_out = out + (split * num_rows + row) * num_outputs
    tl.store(own_out + output, total.to(out.dtype.element_ty), mask=has_output & has_row)


@triton.jit
def _add_splits(
    sums, bias, out, num_rows, num_outputs, SPLITS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Add the sums of splits [SPLITS, rows, outputs] in their order, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    has_output = output < num_outputs
    total = tl.zeros([SIZE], tl.float32)
    for split in tl.static_range(SPLITS):  # reads do not wait for one another
        own = sums + (split * num_rows + row) * num_outputs
        total += tl.load(own + output, mask=has_output, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + output, total.to(out.dtype.element_ty), mask=has_output)


def multiplies(rows: Tensor, weight: Codes) -> bool:
    """Whether `multiply` is for these rows."""
    is_whole = weight.columns % tile_for(len(rows), weight.format.name).columns == 0
    return (
        weight.has_kernels and rows.dtype == torch.bfloat16 and len(rows) <= FEW_ROWS and is_whole
    )


def multiply(rows: Tensor, weight: Codes, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """Return rows [n, in] @ weight.T [in, out] + bias, without a de-quantized copy."""
    tile = tile or tile_for(len(rows), weight.format.name)
    num_rows, num_outputs = len(rows), len(weight.codes)
    rows_at_once = min(max(triton.next_power_of_2(num_rows), SMALLEST_DOT), LARGEST_ROWS)
    grid = triton.cdiv(num_outputs, tile.outputs), triton.cdiv(num_rows, rows_at_once)
    splits = _splits(grid[0] * grid[1], weight, tile)
    out = rows.new_empty(num_rows, num_outputs)
    sums = out
    if splits > 1:
        sums = rows.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
    _multiply[(*grid, splits)](
        rows.contiguous(),
        weight.codes,
        weight.scales,
        _levels(weight, rows.dtype),
        bias if splits == 1 else None,
        sums,
        num_rows,
        num_outputs,
        weight.columns,
        weight.scales.shape[1],
        BLOCK=weight.format.block_of(weight.columns),
        FORMAT=weight.format.name,
        ROWS=rows_at_once,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _add_splits[(num_rows, triton.cdiv(num_outputs, OUTPUTS_AT_ONCE))](
            sums, bias, out, num_rows, num_outputs, SPLITS=splits, SIZE=OUTPUTS_AT_ONCE
        )
    return out


def _splits(num_tiles: int, weight: Codes, tile: Tile) -> int:
    """Return by how many programs each tile of the result is computed; some may have no column."""
    if tile.splits is not None:
        return tile.splits
    column_tiles = triton.cdiv(weight.columns, tile.columns)
    return num_splits(num_tiles, column_tiles, num_processors(weight.codes.device))
