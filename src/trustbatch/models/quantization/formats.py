"""Formats of quantized weights: a code for each weight, and a scale for each block of a row.

A weight is level(code) * scale, computed in float32 and rounded once to the type of the product.

- nf4: the 16 levels of NormalFloat4 (QLoRA), two codes in a byte with the earlier one in its high
  half, and blocks of 64. bitsandbytes stores the same.
- int8: integers from -127 to 127, and one scale for each row.
- fp8: e4m3 numbers, and blocks of 128.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max  # 448
INT8_MAX = 127

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""quantiles of a normal distribution, scaled to [-1, 1], one of them exactly 0"""


@dataclass(frozen=True)
class Format:
    """How weights are stored."""

    name: str
    bits: int
    block: int | None
    """weights of a row with one scale; None is the whole row"""

    def num_blocks(self, columns: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.block is None else -(-columns // self.block)

    def block_of(self, columns: int) -> int:
        """Return the number of weights that share a scale."""
        return columns if self.block is None else self.block


FORMATS = {
    each.name: each
    for each in (Format("nf4", 4, 64), Format("int8", 8, None), Format("fp8", 8, 128))
}


@dataclass(frozen=True)
class Codes:
    """A weight [out, in] in a format."""

    codes: Tensor
    """bytes [out, in], or [out, in / 2] with two codes each"""
    scales: Tensor
    """float32 [out, blocks]"""
    format: Format

    @property
    def columns(self) -> int:
        """The number of inputs."""
        return self.codes.shape[1] * 8 // self.format.bits

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in a floating-point type."""
        if self.codes.is_cuda:
            from trustbatch.models.quantization.kernels import dequantize

            return dequantize(self, dtype)
        block = self.format.block_of(self.columns)
        scales = self.scales.repeat_interleave(block, dim=1)[:, : self.columns]
        return (self._levels() * scales).to(dtype)

    def _levels(self) -> Tensor:
        if self.format.bits == 4:
            both = torch.stack([self.codes >> 4, self.codes & 15], dim=-1).flatten(1)
            return nf4_levels(self.codes.device)[both.int()]
        kind = E4M3 if self.format.name == "fp8" else torch.int8
        return self.codes.view(kind).float()


@cache
def nf4_levels(device: torch.device) -> Tensor:
    """Return the levels of NormalFloat4 [16] on a device."""
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)


def bytes_per_weight(name: str, columns: int) -> float:
    """Return the bytes that a weight of a layer with so many inputs takes, scales included."""
    kind = FORMATS[name]
    return kind.bits / 8 + 4 * kind.num_blocks(columns) / columns


def quantize(weight: Tensor, name: str) -> Codes:
    """Quantize a weight [out, in]; each becomes the nearest number that its block can have."""
    kind = FORMATS[name]
    rows, columns = weight.shape
    block, num_blocks = kind.block_of(columns), kind.num_blocks(columns)
    blocks = functional.pad(weight.detach().float(), (0, num_blocks * block - columns))
    blocks = blocks.view(rows, num_blocks, block)
    scales = blocks.abs().amax(-1) / {"nf4": 1.0, "int8": INT8_MAX, "fp8": E4M3_MAX}[name]
    scaled = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
    scaled = scaled.view(rows, -1)[:, :columns]
    if name == "nf4":
        levels = nf4_levels(weight.device)
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(scaled.contiguous(), middles, out_int32=True).to(torch.uint8)
        codes = (codes[:, ::2] << 4) | codes[:, 1::2]
    elif name == "int8":
        codes = scaled.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8).view(torch.uint8)
    else:
        codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
    return Codes(codes.contiguous(), scales, kind)
