"""Into how many sums over columns the product of few rows is split."""

import pytest
import torch

from trustbatch.models.quantization.tiles import num_processors, num_splits


@pytest.mark.parametrize(
    ("num_tiles", "column_tiles", "expected"),
    [
        (792, 1000, 1),  # 6 for each of 132
        (791, 1000, 2),
        (64, 96, 16),  # 4,096 x 12,288: 64 * 8 = 512 are too few, 1,024 are enough
        (80, 136, 16),  # 5,120 x 17,408: 640, 1,280
        (544, 40, 2),  # 34,816 x 5,120
        (1, 1000, 16),  # not 512
        (1, 32, 8),  # 4 tiles of columns in each
        (1, 31, 4),
        (1, 8, 2),
        (1, 7, 1),
        (1, 1, 1),
    ],
)
def test_programs_are_enough_for_the_gpu(num_tiles: int, column_tiles: int, expected: int) -> None:
    assert num_splits(num_tiles, column_tiles, num_processors=132) == expected


def test_a_smaller_gpu_has_fewer_splits() -> None:
    assert num_splits(64, 96, num_processors=10) == 1  # 60 are enough
    assert num_splits(64, 96, num_processors=11) == 2  # 66
    assert num_splits(3, 96, num_processors(torch.device("cpu"))) == 2  # 6
