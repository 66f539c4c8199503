"""The KV cache on a GPU: pages of a pool that grows as needed.

A prompt's full pages are shared by all its samples; a partly filled page is copied. A page returns
to the pool when no row holds it any more.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.rollout.native import kernels
from trustbatch.rollout.native.cache import GROWTH, PAGE, CacheFullError, HeadNorms, Heads

SCRATCH = 0
"""the page that padding writes to"""
SPARE = 1.125
"""size of a new pool, relative to the most pages held before it was cleared"""


class _NewPrompts(NamedTuple):
    """Prompts whose keys and values are being computed."""

    pages: list[list[int]]
    lengths: list[int]
    copies: list[int]


class PagedCache:
    """Pages [pages, KV heads, PAGE, D] of keys and values in each layer, with reference counts."""

    def __init__(
        self,
        heads: Heads,
        num_layers: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
        max_rows: int,
        room: Callable[[int], float],
    ) -> None:
        """`room` returns the bytes by which the pool may grow, for a number of rows."""
        self.heads = heads
        self.room = room
        self.device = device
        self.dtype = dtype
        self.num_layers = num_layers
        self.shape = (heads.num_kv, PAGE, heads.dim)
        self.num_processors = _num_processors(device)
        self.max_rows = max_rows
        self.address = 0
        """changes whenever a tensor that a CUDA graph reads has moved"""
        self._most_held = self._expected = 0
        self.clear()

    def clear(self) -> None:
        """Drop all rows and free their memory; the next pool starts with the size they needed."""
        options = {"dtype": self.dtype, "device": self.device}
        self.keys = [torch.empty(1, *self.shape, **options) for _ in range(self.num_layers)]
        self.values = [torch.empty_like(part) for part in self.keys]
        self.table = torch.zeros(self.max_rows, 1, dtype=torch.int32, device=self.device)
        self.address += 1
        self.rows: list[list[int]] = []
        self.lengths: list[int] = []
        self._holders = [1]  # the scratch page is never free
        self._free: list[int] = []
        self._new = _NewPrompts([], [], [])
        self._table_is_current = False
        self._expected = int(self._most_held * SPARE)
        self._most_held = 0

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return len(self._holders)

    def add_prompts(self, lengths: list[int], copies: list[int]) -> None:
        """Allocate pages for prompts; `finish_prompts` adds the rows that continue them."""
        own_pages = sum(copies)
        num_rows = len(self.rows) + own_pages
        self._require(sum(_num_pages(length) for length in lengths) + own_pages, num_rows)
        pages = [[self._take() for _ in range(_num_pages(length))] for length in lengths]
        self._new = _NewPrompts(pages, lengths, copies)
        widest = max(len(each) for each in pages)
        padded = [each + [SCRATCH] * (widest - len(each)) for each in pages]
        self._new_table = self._to_device(padded).long()

    def store_prompts(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store one layer's keys and values [P, KV heads, L, D] of the prompts added last."""
        for pool, part in ((self.keys[layer], keys), (self.values[layer], values)):
            part = functional.pad(part, (0, 0, 0, -part.shape[2] % PAGE))
            pool[self._new_table] = part.unflatten(2, (-1, PAGE)).transpose(1, 2)

    def finish_prompts(self) -> None:
        """Add the rows of each prompt: full pages are shared, a partly filled one is copied."""
        sources, targets = [], []
        for pages, length, count in zip(*self._new, strict=True):
            is_partial = length % PAGE != 0
            shared = pages[:-1] if is_partial else pages
            for number in range(count):
                row = list(shared)
                if number > 0:
                    for page in shared:
                        self._holders[page] += 1
                if is_partial:
                    own = pages[-1] if number == 0 else self._take()
                    if number > 0:
                        sources.append(pages[-1])
                        targets.append(own)
                    row.append(own)
                self.rows.append(row)
                self.lengths.append(length)
        self._table_is_current = False
        if sources:
            source, target = self._to_device(sources).long(), self._to_device(targets).long()
            for pool in (*self.keys, *self.values):
                pool[target] = pool[source]

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: tuple[Tensor, Tensor],
        position: Tensor,
    ) -> Tensor:
        """Store one key and value per row, from [n, (H + 2 KV) D]; return attention [n, H D]."""
        keys, values = self.keys[layer], self.values[layer]
        table = self.table[: len(qkv)]
        query = kernels.rotate_and_store(
            qkv,
            keys,
            values,
            rotary=rotary,
            position=position,
            table=table,
            norms=norms,
            epsilon=self.heads.epsilon,
            num_heads=self.heads.num_query,
        )
        splits = kernels.splits_for(len(qkv), self.heads.num_kv, self.num_processors)
        out = kernels.attend(query, keys, values, table=table, position=position, splits=splits)
        return out.flatten(1)

    def reserve(self, num_steps: int) -> None:
        """Reserve pages for `num_steps` more tokens in every row."""
        wanted = [_num_pages(length + num_steps) for length in self.lengths]
        missing = sum(n - len(row) for n, row in zip(wanted, self.rows, strict=True))
        self._require(missing, len(self.rows))
        for row, number in zip(self.rows, wanted, strict=True):
            if number > len(row):
                row.extend(self._take() for _ in range(number - len(row)))
                self._table_is_current = False
        if not self._table_is_current:
            self._write_table(max(wanted, default=1))

    def advance(self, num_steps: int) -> None:
        """Advance all rows by `num_steps` tokens."""
        self.lengths = [length + num_steps for length in self.lengths]

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this order; pages that only others held are freed."""
        kept = set(index)
        for number, row in enumerate(self.rows):
            if number not in kept:
                for page in row:
                    self._holders[page] -= 1
                    if self._holders[page] == 0:
                        self._free.append(page)
        self.rows = [self.rows[number] for number in index]
        self.lengths = [self.lengths[number] for number in index]
        self._table_is_current = False

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        self._most_held = max(self._most_held, self.num_pages - len(self._free))
        return page

    def _require(self, num_pages: int, num_rows: int) -> None:
        """Grow the pool until `num_pages` pages are free, and leave `num_rows` rows their room."""
        missing = num_pages - len(self._free)
        if missing <= 0:
            return
        old = self.num_pages
        least, wanted = old + missing, max(int(old * GROWTH), self._expected)
        most = self._largest(num_rows)
        if least > most:
            raise CacheFullError
        try:
            new = self._grow(max(least, min(wanted, most)))
        except torch.OutOfMemoryError:
            try:
                new = self._grow(least)
            except torch.OutOfMemoryError as error:
                raise CacheFullError from error
        self._holders += [0] * (new - old)
        self._free += range(old, new)

    def _largest(self, num_rows: int) -> float:
        """Return the most pages for which there is room."""
        in_layer = math.prod(self.shape) * self.dtype.itemsize
        in_all = 2 * self.num_layers * in_layer
        # while the pool grows, the keys or values of one layer exist twice
        return (self.room(num_rows) + self.num_pages * in_all) / (in_all + in_layer)

    def _grow(self, num_pages: int) -> int:
        """Make every layer's pool at least this large, one after the other."""
        self.address += 1
        for parts in (self.keys, self.values):
            for layer in range(self.num_layers):
                if len(parts[layer]) < num_pages:
                    grown = parts[layer].new_empty(num_pages, *self.shape)
                    grown[: len(parts[layer])] = parts[layer]
                    parts[layer] = grown
                    if self.device.type == "cuda":
                        torch.cuda.empty_cache()  # the old memory is too small for any later pool
        return num_pages

    def _write_table(self, width: int) -> None:
        if width > self.table.shape[1]:
            shape = (self.max_rows, max(width, 2 * self.table.shape[1]))
            self.table = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.address += 1
        padded = [row + [SCRATCH] * (width - len(row)) for row in self.rows]
        if padded:
            self.table[: len(padded), :width].copy_(self._to_device(padded))
        # rows beyond the running ones are padding of a graph's batch
        self.table[len(padded) :, :1] = SCRATCH
        self._table_is_current = True

    def _to_device(self, numbers: list[int] | list[list[int]]) -> Tensor:
        host = torch.tensor(numbers, dtype=torch.int32)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)


def _num_pages(length: int) -> int:
    return -(-length // PAGE)


def _num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
