"""Cutting sequences into chunks: by the number of items, or by their size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def chunks_of(items: Sequence[Item], num_items: int) -> list[Sequence[Item]]:
    """Split a sequence into chunks of `num_items`; the last chunk may have fewer."""
    return [items[start : start + num_items] for start in range(0, len(items), num_items)]


def chunks_by_size(
    items: Iterable[Item], *, size_of: Callable[[Item], int], max_size: int
) -> Iterator[list[Item]]:
    """Yield consecutive items whose sizes sum to at most `max_size`, or a single larger item."""
    chunk: list[Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if chunk and total + size > max_size:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk
