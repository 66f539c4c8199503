"""Which rows of a batch begin with the same pages, told to the attention kernels."""

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from trustbatch.rollout.native.cache import Heads

TILE_QUERIES = 16
"""queries that a kernel has for shared pages, of all rows of a tile; more if one row has more"""
LEAST_SAVED = 32 * 2**20
"""bytes of a layer's keys and values that must be read once less for a kernel of its own to pay"""
LEAST_SHARE = 0.3
"""of all pages that must be read once less: the GPU's own cache serves rows that run side by side,
at about twice the speed of its memory"""
OWN_PAGES = 4
"""pages beside the prompt's that a row is expected to have"""


class SharedPages(NamedTuple):
    """Tiles of rows that begin with the same pages; tensors that never move."""

    num_tiles: Tensor
    """[1]"""
    tile_rows: Tensor
    """[tiles, rows per tile], -1 where a tile has fewer"""
    tile_pages: Tensor
    """[tiles], how many pages its rows share"""
    row_pages: Tensor
    """[rows], the same for each row; 0 for rows of no tile"""


class PromptTiles:
    """Tiles of a few adjacent rows of one prompt, in one tensor."""

    def __init__(
        self, heads: Heads, *, page_bytes: int, max_rows: int, device: torch.device
    ) -> None:
        self.page_bytes = page_bytes
        self.size = max(TILE_QUERIES // (heads.num_query // heads.num_kv), 1)
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
        num_read = sum(num_pages + OWN_PAGES for _, num_pages in prompts)
        if saved * self.page_bytes < LEAST_SAVED or saved < LEAST_SHARE * num_read:
            self.shared = None
            return
        self._tensor.copy_(self._on_host(tiles), non_blocking=True)
        self.shared = self._pages

    def _on_host(self, tiles: list[tuple[list[int], int]]) -> Tensor:
        numbers = torch.zeros(sum(self._sizes), dtype=torch.int32)
        num_tiles, tile_rows, tile_pages, row_pages = numbers.split(self._sizes)
        num_tiles[0] = len(tiles)
        for number, (members, num_pages) in enumerate(tiles):
            padded = members + [-1] * (self.size - len(members))
            tile_rows[number * self.size : (number + 1) * self.size] = torch.tensor(padded)
            tile_pages[number] = num_pages
            row_pages[members] = num_pages
        return numbers.pin_memory() if self._tensor.is_cuda else numbers
