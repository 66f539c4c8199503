"""Which rows of a batch begin with the same pages, told to the attention kernels."""

from itertools import groupby

import torch
from torch import Tensor

from trustbatch.rollout.native.attention_kernels import SharedPages, rows_per_tile
from trustbatch.rollout.native.cache import Heads

LEAST_SAVED = 32 * 2**20
"""bytes of a layer's keys and values that must be read once less for a kernel of its own to pay"""


class PromptTiles:
    """Tiles of up to `rows_per_tile` adjacent rows of one prompt, in one tensor that never moves."""

    def __init__(self, heads: Heads, *, page_bytes: int, max_rows: int, device: torch.device) -> None:
        self.page_bytes = page_bytes
        self.size = rows_per_tile(heads.num_query // heads.num_kv)
        self.least_saved = LEAST_SAVED
        self.max_rows = max_rows
        max_tiles = max(max_rows // 2, 1)
        self._sizes = [1, max_tiles * self.size, max_tiles, max_rows]
        self._tensor = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        num_tiles, rows, pages, row_pages = self._tensor.split(self._sizes)
        self._pages = SharedPages(num_tiles, rows.view(max_tiles, self.size), pages, row_pages)
        self.shared: SharedPages | None = None
        """None where nothing worthwhile is shared"""

    def write(self, prompts: list[tuple[int, int]]) -> None:
        """Find the tiles of rows, each given by the number of its prompt and that one's pages."""
        tiles: list[tuple[list[int], int]] = []
        for (_, num_pages), rows in groupby(range(len(prompts)), key=lambda row: prompts[row]):
            members = list(rows)
            for start in range(0, len(members), self.size):
                tile = members[start : start + self.size]
                if len(tile) > 1 and num_pages:
                    tiles.append((tile, num_pages))
        saved = sum((len(tile) - 1) * num_pages for tile, num_pages in tiles)
        if not tiles or saved * self.page_bytes < self.least_saved:
            self.shared = None
            return
        self._tensor.copy_(self._on_host(tiles), non_blocking=True)
        self.shared = self._pages

    def _on_host(self, tiles: list[tuple[list[int], int]]) -> Tensor:
        numbers = torch.zeros(sum(self._sizes), dtype=torch.int32)
        num_tiles, rows, pages, row_pages = numbers.split(self._sizes)
        num_tiles[0] = len(tiles)
        padded = [tile + [-1] * (self.size - len(tile)) for tile, _ in tiles]
        rows.view(-1, self.size)[: len(tiles)] = torch.tensor(padded)
        pages[: len(tiles)] = torch.tensor([num_pages for _, num_pages in tiles])
        members = [row for tile, _ in tiles for row in tile]
        row_pages[members] = torch.tensor(
            [num_pages for tile, num_pages in tiles for _ in tile], dtype=torch.int32
        )
        return numbers.pin_memory() if self._tensor.is_cuda else numbers
