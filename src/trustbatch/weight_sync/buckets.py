"""Buckets: many tensors in one, so that few large messages travel instead of many small ones."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET_BYTES = 2**28
"""a larger tensor has a bucket of its own"""
ALIGNMENT = 16
"""of tensors within a bucket, so that any type can be read in place"""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's name and form, from which its room in a bucket follows."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """What the tensor itself takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes from its start to that of the next one."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Which tensors lie in a bucket, in their order."""

    places: tuple[Place, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole bucket."""
        return sum(place.room for place in self.places)

    def tensors(self, content: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a bucket by name, as views of its bytes."""
        start = 0
        for place in self.places:
            part = content[start : start + place.num_bytes]
            yield place.name, part.view(place.dtype).view(place.shape)
            start += place.room


@dataclass(frozen=True, slots=True)
class Bucket:
    """Copies of some tensors, one behind the other."""

    layout: BucketLayout
    content: Tensor
    """bytes, on the device of the tensors"""


def packed(
    weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None
) -> list[Bucket]:
    """Copy weights into buckets, rounded to a type unless that is None."""
    buckets: list[Bucket] = []
    waiting: list[tuple[Place, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        place = Place(name, dtype or tensor.dtype, tuple(tensor.shape))
        if waiting and num_bytes + place.room > BUCKET_BYTES:
            buckets.append(_filled(waiting))
            waiting, num_bytes = [], 0
        waiting.append((place, tensor))
        num_bytes += place.room
    if waiting:
        buckets.append(_filled(waiting))
    return buckets


def _filled(tensors: list[tuple[Place, Tensor]]) -> Bucket:
    layout = BucketLayout(tuple(place for place, _ in tensors))
    content = torch.empty(layout.num_bytes, dtype=torch.uint8, device=tensors[0][1].device)
    for (_, copy), (_, tensor) in zip(layout.tensors(content), tensors, strict=True):
        copy.copy_(tensor.detach())
    return Bucket(layout, content)
