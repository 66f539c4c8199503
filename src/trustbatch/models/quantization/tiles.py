"""How the fused product of few rows divides its work among a GPU's multiprocessors."""

from dataclasses import dataclass
from functools import cache

import torch

SMALLEST_DOT = 16
"""rows that a tensor-core product has at least"""
FEWEST_PROGRAMS = 6
"""for each multiprocessor, so that some of them read while others compute"""
MAX_SPLITS = 16
FEWEST_TILES = 4
"""of columns in a split, below which starting a program costs more than its loop"""


@dataclass(frozen=True)
class Tile:
    """What a program of the product does."""

    outputs: int = 64
    columns: int = 128
    """that it multiplies at once"""
    warps: int = 4
    stages: int = 4
    splits: int | None = None
    """programs that divide the columns among them; None is as many as `num_splits` says"""


def tile_for(num_rows: int, format_name: str) -> Tile:
    """Return a tile that was fast where it was measured: one of 2 stages for many rows of nf4."""
    if num_rows <= SMALLEST_DOT:
        return Tile(outputs=32)
    return Tile(stages=2) if format_name == "nf4" else Tile()


def num_splits(num_tiles: int, column_tiles: int, num_processors: int) -> int:
    """Return by how many programs each tile of the result is computed, a power of two.

    There are at least 6 programs for each multiprocessor, as far as the columns allow it.
    """
    splits = 1
    while num_tiles * splits < FEWEST_PROGRAMS * num_processors and 2 * splits <= min(
        MAX_SPLITS, column_tiles // FEWEST_TILES
    ):
        splits *= 2
    return splits


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
