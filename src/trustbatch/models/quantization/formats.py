"""Formats of quantized weights: a code for each weight, and a scale for each block of a row.

A weight is level(code) * scale: both rounded to the type of the product that uses it, and their
product again. In bfloat16 that is far below what quantization itself changes.

- nf4: the 16 levels of NormalFloat4 (QLoRA), and blocks of 64. A byte has two codes: the one in its
  high half is of the first half of a block, the other of the second, so that kernels read rows of
  activations in order.
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
NF4_BLOCK = 64

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
    block: int | None
    """weights of a row with one scale; None is the whole row"""

    def num_blocks(self, columns: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.block is None else -(-columns // self.block)

    def block_of(self, columns: int) -> int:
        """Return the number of weights that share a scale."""
        return columns if self.block is None else self.block


FORMATS = {
    each.name: each for each in (Format("nf4", NF4_BLOCK), Format("int8", None), Format("fp8", 128))
}


@dataclass(frozen=True)
class Codes:
    """A weight [out, in] in a format."""

    codes: Tensor
    """bytes [out, in]; of nf4 [out, 32 for each block]"""
    scales: Tensor
    """float32 [out, blocks]"""
    format: Format
    columns: int
    """the number of inputs"""

    @property
    def has_kernels(self) -> bool:
        """Whether GPU kernels can read it; older GPUs do not convert FP8."""
        if not self.codes.is_cuda or self.format.name != "fp8":
            return self.codes.is_cuda
        return torch.cuda.get_device_capability(self.codes.device) >= (8, 9)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in a floating-point type."""
        if self.has_kernels:
            from trustbatch.models.quantization.kernels import dequantize

            return dequantize(self, dtype)
        block = self.format.block_of(self.columns)
        scales = self.scales.to(dtype).repeat_interleave(block, dim=1)
        return self._levels().to(dtype)[:, : self.columns] * scales[:, : self.columns]

    def _levels(self) -> Tensor:
        if self.format.name == "nf4":
            return nf4_levels(self.codes.device)[unpack_halves(self.codes).int()]
        return self.codes.view(E4M3 if self.format.name == "fp8" else torch.int8).float()


def pack_halves(codes: Tensor) -> Tensor:
    """Return codes of 4 bits [out, blocks * 64] as bytes [out, blocks * 32]."""
    first, second = codes.unflatten(1, (-1, 2, NF4_BLOCK // 2)).unbind(2)
    return ((first << 4) | second).flatten(1).contiguous()


def unpack_halves(codes: Tensor) -> Tensor:
    """Return what `pack_halves` has packed."""
    blocks = codes.unflatten(1, (-1, NF4_BLOCK // 2))
    return torch.stack([blocks >> 4, blocks & 15], dim=2).flatten(1)


@cache
def nf4_levels(device: torch.device) -> Tensor:
    """Return the levels of NormalFloat4 [16] on a device."""
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)


def bytes_per_weight(name: str, columns: int) -> float:
    """Return the bytes that a weight of a layer with so many inputs takes, scales included."""
    kind = FORMATS[name]
    num_blocks = kind.num_blocks(columns)
    codes = num_blocks * NF4_BLOCK / 2 if name == "nf4" else columns
    return (codes + 4 * num_blocks) / columns


def quantize(weight: Tensor, name: str) -> Codes:
    """Quantize a weight [out, in]; each becomes the nearest number that its block can have."""
    kind = FORMATS[name]
    rows, columns = weight.shape
    block, num_blocks = kind.block_of(columns), kind.num_blocks(columns)
    blocks = functional.pad(weight.detach().float(), (0, num_blocks * block - columns))
    blocks = blocks.view(rows, num_blocks, block)
    scales = blocks.abs().amax(-1) / {"nf4": 1.0, "int8": INT8_MAX, "fp8": E4M3_MAX}[name]
    scaled = (blocks / torch.where(scales > 0, scales, 1.0)[..., None]).view(rows, -1)
    if name == "nf4":
        levels = nf4_levels(weight.device)
        middles = (levels[1:] + levels[:-1]) / 2
        codes = pack_halves(torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8))
    else:
        scaled = scaled[:, :columns].contiguous()
        if name == "int8":
            codes = scaled.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8).view(torch.uint8)
        else:
            codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
    return Codes(codes, scales, kind, columns)
