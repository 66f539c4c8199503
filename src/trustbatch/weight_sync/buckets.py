"""Buckets: many tensors packed into one, so that few large messages are sent instead of many."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.utils.chunks import chunks_by_size

BUCKET_BYTES = 2**28
"""a larger tensor gets a bucket of its own"""
ALIGNMENT = 16
"""of tensors within a bucket, so that any dtype can be read in place"""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, dtype and shape, which determine its size in a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor itself."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes from its start to the start of the next tensor."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The tensors of a bucket, in order."""

    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole bucket."""
        return sum(spec.padded_bytes for spec in self.specs)

    def tensors(self, content: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a bucket by name, as views of its bytes."""
        start = 0
        for spec in self.specs:
            part = content[start : start + spec.num_bytes]
            yield spec.name, part.view(spec.dtype).view(spec.shape)
            start += spec.padded_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Packed copies of some tensors."""

    layout: BucketLayout
    content: Tensor
    """bytes, on the device of the tensors"""


def pack_buckets(
    weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None
) -> list[Bucket]:
    """Copy weights into buckets, converted to `dtype` (default: each keeps its own)."""
    tensors = (
        (TensorSpec(name, dtype or tensor.dtype, tuple(tensor.shape)), tensor)
        for name, tensor in weights
    )
    chunks = chunks_by_size(
        tensors, size_of=lambda pair: pair[0].padded_bytes, max_size=BUCKET_BYTES
    )
    return [_pack(chunk) for chunk in chunks]


def _pack(tensors: list[tuple[TensorSpec, Tensor]]) -> Bucket:
    layout = BucketLayout(tuple(spec for spec, _ in tensors))
    content = torch.empty(layout.num_bytes, dtype=torch.uint8, device=tensors[0][1].device)
    for (_, copy), (_, tensor) in zip(layout.tensors(content), tensors, strict=True):
        copy.copy_(tensor.detach())
    return Bucket(layout, content)
