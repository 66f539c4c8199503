"""The KV cache on a GPU: pages of a pool that grows as needed.

A prompt's full pages are shared by all its samples; a partly filled page is copied. A page returns
to the pool when no row holds it any more.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.models.quantization.tiles import num_processors
from trustbatch.rollout.native.attention_kernels import attend
from trustbatch.rollout.native.cache import (
    GROWTH,
    PAGE,
    CacheFullError,
    HeadNorms,
    Heads,
    LayerPages,
)
from trustbatch.rollout.native.linear import quantize_rows
from trustbatch.rollout.native.prompt_tiles import PromptTiles
from trustbatch.rollout.native.store_kernels import rotate_and_store
from trustbatch.utils.cuda_memory import send

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
    """Pages [pages, KV heads, PAGE, D] of keys and values in each layer, with reference counts.

    FP8 ones are bytes, as few operations of torch know e4m3, and a scale for each token and head.
    """

    def __init__(
        self,
        heads: Heads,
        num_layers: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
        max_rows: int,
        room: Callable[[int], float],
        is_fp8: bool = False,
    ) -> None:
        """`room` returns the bytes by which the pool may grow, for a number of rows."""
        self.heads = heads
        self.room = room
        self.device = device
        self.dtype = torch.uint8 if is_fp8 else dtype
        self.is_fp8 = is_fp8
        self.num_layers = num_layers
        self.num_processors = num_processors(device)
        self.max_rows = max_rows
        page_bytes = 2 * heads.num_kv * PAGE * heads.dim * self.dtype.itemsize
        self.tiles = PromptTiles(heads, page_bytes=page_bytes, max_rows=max_rows, device=device)
        self.address = 0
        """changes whenever a tensor that a CUDA graph reads has moved"""
        self._most_held = self._expected = 0
        self._table_width = 1
        """pages of the longest row so far"""
        self.clear()

    def clear(self) -> None:
        """Drop all rows and free their memory; the next pool starts with the size they needed."""
        slots = (1, self.heads.num_kv, PAGE)
        self.keys, self.values = self._new_pools(*slots, self.heads.dim, dtype=self.dtype)
        self.key_scales: list[Tensor] = []
        self.value_scales: list[Tensor] = []
        if self.is_fp8:
            self.key_scales, self.value_scales = self._new_pools(*slots, dtype=torch.float32)
        self.table = self._new_table_of(self._table_width)
        self.address += 1
        self.rows: list[list[int]] = []
        self.lengths: list[int] = []
        self._prompts: list[tuple[int, int]] = []
        """each row's prompt, and how many of its pages all its rows share"""
        self._num_prompts = 0
        self._holders = [1]  # the scratch page is never free
        self._free: list[int] = []
        self._new = _NewPrompts([], [], [])
        self._rows_are_current = False
        self._expected = int(self._most_held * SPARE)
        self._most_held = 0

    def _new_pools(self, *shape: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Return each layer's pool, for keys and for values."""
        pools = [
            torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2 * self.num_layers)
        ]
        return pools[: self.num_layers], pools[self.num_layers :]

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    @property
    def _pools(self) -> tuple[list[Tensor], ...]:
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def shares_pages(self) -> bool:
        """Whether attention reads some pages for several rows at once, with kernels of its own."""
        return self.tiles.shared is not None

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

    def store_prompts(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values [P, KV heads, L, D] of the prompts added last."""
        if not self.is_fp8:
            self._store(self.keys[layer], keys)
            self._store(self.values[layer], values)
            return keys, values
        return (
            self._store_rounded(self.keys[layer], self.key_scales[layer], keys),
            self._store_rounded(self.values[layer], self.value_scales[layer], values),
        )

    def _store_rounded(self, pool: Tensor, scales: Tensor, part: Tensor) -> Tensor:
        """Store e4m3 numbers and their scales; return what they stand for."""
        rounded, scale = quantize_rows(part)
        self._store(pool, rounded.view(torch.uint8))
        self._store(scales[..., None], scale)
        return (rounded.float() * scale).to(part.dtype)

    def _store(self, pool: Tensor, part: Tensor) -> None:
        part = functional.pad(part, (0, 0, 0, -part.shape[2] % PAGE))
        pool[self._new_table] = part.unflatten(2, (-1, PAGE)).transpose(1, 2)

    def drop_prompts(self) -> None:
        """Free the pages of the prompts added last."""
        for page in chain(*self._new.pages):
            self._holders[page] = 0
            self._free.append(page)

    def finish_prompts(self) -> None:
        """Add the rows of each prompt: full pages are shared, a partly filled one is copied."""
        sources, targets = [], []
        for pages, length, count in zip(*self._new, strict=True):
            is_partial = length % PAGE != 0
            shared = pages[:-1] if is_partial else pages
            self._prompts += [(self._num_prompts, len(shared))] * count
            self._num_prompts += 1
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
        self._rows_are_current = False
        if sources:
            source, target = self._to_device(sources).long(), self._to_device(targets).long()
            for pool in chain(*self._pools):
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
        pages = LayerPages(
            self.keys[layer],
            self.values[layer],
            self.key_scales[layer] if self.is_fp8 else None,
            self.value_scales[layer] if self.is_fp8 else None,
        )
        table = self.table[: len(qkv)]
        query = rotate_and_store(
            qkv,
            pages,
            rotary=rotary,
            position=position,
            table=table,
            norms=norms,
            epsilon=self.heads.epsilon,
            num_heads=self.heads.num_query,
        )
        out = attend(
            query,
            pages,
            table=table,
            position=position,
            num_processors=self.num_processors,
            shared=self.tiles.shared,
        )
        return out.flatten(1)

    def reserve(self, num_steps: int, most_steps: int) -> None:
        """Reserve pages for `num_steps` more tokens in every row; it gets at most `most_steps`."""
        wanted = [_num_pages(length + num_steps) for length in self.lengths]
        self._require(self._missing(num_steps), len(self.rows), self._missing(most_steps))
        entries: list[list[int]] = []
        """row, number within it, and page of those that are new"""
        for number, (row, most) in enumerate(zip(self.rows, wanted, strict=True)):
            while len(row) < most:
                page = self._take()
                entries.append([number, len(row), page])
                row.append(page)
        width = max(wanted, default=1)
        if not self._rows_are_current or width > self.table.shape[1]:
            self._write_table(width)
            self.tiles.write(self._prompts)
            self._rows_are_current = True
        elif entries:
            row_of, place, pages = self._to_device(entries).T
            self.table[row_of.long(), place.long()] = pages
        self._table_width = max(self._table_width, width)

    def _missing(self, num_steps: int) -> int:
        """Return how many pages `num_steps` more tokens in every row need."""
        wanted = sum(_num_pages(length + num_steps) for length in self.lengths)
        return wanted - sum(map(len, self.rows))

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
        self._prompts = [self._prompts[number] for number in index]
        self._rows_are_current = False

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        self._most_held = max(self._most_held, self.num_pages - len(self._free))
        return page

    def _require(self, num_pages: int, num_rows: int, most_pages: float = math.inf) -> None:
        """Grow the pool until `num_pages` pages are free, and leave `num_rows` rows their room.

        It does not grow further than for `most_pages` free pages, which is all that may be needed.
        """
        missing = num_pages - len(self._free)
        if missing <= 0:
            return
        old = self.num_pages
        least, wanted = old + missing, max(int(old * GROWTH), self._expected)
        most = min(self._largest(num_rows), old + most_pages - len(self._free))
        if least > most:
            raise CacheFullError
        try:
            new = self._grow(max(least, int(min(wanted, most))))
        except torch.OutOfMemoryError:
            try:
                new = self._grow(least)
            except torch.OutOfMemoryError as error:
                raise CacheFullError from error
        self._holders += [0] * (new - old)
        self._free += range(old, new)

    def _largest(self, num_rows: int) -> float:
        """Return the most pages for which there is room."""
        in_layer = self.keys[0][0].nbytes
        in_all = sum(pool[0].nbytes for pool in chain(*self._pools))
        # while the pool grows, the keys or values of one layer exist twice
        return (self.room(num_rows) + self.num_pages * in_all) / (in_all + in_layer)

    def _grow(self, num_pages: int) -> int:
        """Make every layer's pool at least this large, one after the other."""
        self.address += 1
        has_rows = self.num_pages > 1  # else there is but the scratch page, not worth the time
        for parts in self._pools:
            for layer in range(len(parts)):
                if len(parts[layer]) < num_pages:
                    grown = parts[layer].new_empty(num_pages, *parts[layer].shape[1:])
                    grown[: len(parts[layer])] = parts[layer]
                    parts[layer] = grown
                    if self.device.type == "cuda" and has_rows:
                        torch.cuda.empty_cache()  # the old memory is too small for any later pool
        return num_pages

    def _write_table(self, width: int) -> None:
        if width > self.table.shape[1]:
            self.table = self._new_table_of(max(width, 2 * self.table.shape[1]))
            self.address += 1
        padded = [row + [SCRATCH] * (width - len(row)) for row in self.rows]
        if padded:
            self.table[: len(padded), :width].copy_(self._to_device(padded))
        # rows beyond the running ones are padding of a graph's batch
        self.table[len(padded) :, :1] = SCRATCH

    def _new_table_of(self, width: int) -> Tensor:
        return torch.zeros(self.max_rows, width, dtype=torch.int32, device=self.device)

    def _to_device(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.int32), self.device)


def _num_pages(length: int) -> int:
    return -(-length // PAGE)
