"""Triton kernels of decoding on a GPU, attention aside: one kernel between two matrix products.

Numbers are rounded where the trainer's forward pass rounds them (a product's output is bfloat16
under autocast, the residual stream float32), so that both compute the same function.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor


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
def _store_statistics(x, maxima, sums, offsets, inside):
    largest = tl.max(x, 1)
    finite = tl.where(largest == -float("inf"), 0.0, largest)
    # a maximum skips NaN, a sum does not: it must reach the host
    total = tl.sum(tl.exp(x - finite[:, None]), 1)
    tl.store(maxima + offsets, largest, mask=inside)
    tl.store(sums + offsets, total, mask=inside)


@triton.jit
def _block_statistics(logits, maxima, sums, factor, second_factor, third_factor, row_stride,
                      num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    x = tl.load(
        logits + row * row_stride + blocks[:, None] * BLOCK + tl.arange(0, BLOCK),
        mask=inside[:, None],
        other=0.0,
    ).to(tl.float32)
    num_all = tl.num_programs(0).to(tl.int64) * num_blocks
    offsets = row * num_blocks + blocks
    _store_statistics(x * factor, maxima, sums, offsets, inside)
    if second_factor is not None:
        _store_statistics(x * second_factor, maxima, sums, num_all + offsets, inside)
    if third_factor is not None:
        _store_statistics(x * third_factor, maxima, sums, 2 * num_all + offsets, inside)


def block_statistics(logits: Tensor, *temperatures: float) -> tuple[Tensor, Tensor]:
    """Return maxima and sums of exp [T, B, n] over blocks [B, n, BLOCK] of logits.

    Divided by up to three temperatures, for which the logits are read once.
    """
    num_rows, num_blocks, block = logits.shape
    shape = (len(temperatures), num_rows, num_blocks)
    maxima = torch.empty(shape, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    factors = [*(reciprocal(temperature) for temperature in temperatures), None, None]
    blocks_each = 32
    _block_statistics[(num_rows, triton.cdiv(num_blocks, blocks_each))](
        logits, maxima, sums, *factors[:3], logits.stride(0), num_blocks,
        BLOCK=block, BLOCKS=blocks_each,
    )  # fmt: skip
    return maxima, sums


def reciprocal(temperature: float) -> float:
    """Return 1 / temperature in float32: torch multiplies by it to divide on a GPU."""
    return (1 / torch.tensor(temperature, device="cpu")).item()


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
