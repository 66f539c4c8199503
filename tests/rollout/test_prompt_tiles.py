import torch

from trustbatch.rollout.native.cache import Heads
from trustbatch.rollout.native.prompt_tiles import PromptTiles

CPU = torch.device("cpu")
MEBIBYTE = 2**20


def make_tiles(
    *, num_query: int = 16, page_bytes: int = MEBIBYTE, max_rows: int = 32
) -> PromptTiles:
    heads = Heads(num_query=num_query, num_kv=8, dim=128, epsilon=1e-6)
    return PromptTiles(heads, page_bytes=page_bytes, max_rows=max_rows, device=CPU)


def test_adjacent_rows_of_a_prompt_are_a_tile() -> None:
    tiles = make_tiles()  # two queries a row for each key head: eight rows have sixteen
    # ten rows of prompt 0, two of one without a full page, one row alone, and three
    tiles.write([(0, 12)] * 10 + [(1, 0)] * 2 + [(2, 12)] + [(3, 11)] * 3)
    assert tiles.shared is not None
    num_tiles, rows, pages, row_pages = tiles.shared
    assert num_tiles.tolist() == [3]
    assert rows[:3].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, -1, -1, -1, -1, -1, -1],
        [13, 14, 15, -1, -1, -1, -1, -1],
    ]
    assert pages[:3].tolist() == [12, 12, 11]
    assert row_pages.tolist() == [12] * 10 + [0] * 3 + [11] * 3 + [0] * 16


def test_rows_that_leave_are_forgotten() -> None:
    tiles = make_tiles()
    tiles.write([(0, 9)] * 10)
    tiles.write([(0, 20)] * 5)
    assert tiles.shared is not None
    assert tiles.shared.num_tiles.tolist() == [1]
    assert tiles.shared.row_pages.tolist() == [20] * 5 + [0] * 27


def test_a_row_with_many_queries_has_small_tiles() -> None:
    assert make_tiles(num_query=64).size == 2
    assert make_tiles(num_query=256).size == 1


def test_pages_are_shared_where_that_pays() -> None:
    """Eight rows save seven readings of p pages, of 8 (p + 4): 0.3 of them from p = 48/23 on."""
    for num_pages, pays in ((1, False), (2, False), (3, True), (40, True)):
        tiles = make_tiles(page_bytes=4 * MEBIBYTE)
        tiles.write([(0, num_pages)] * 8)
        assert (tiles.shared is not None) == pays
    # 42 pages are 42 MiB, or 10.5
    tiles = make_tiles(page_bytes=MEBIBYTE // 4)
    tiles.write([(0, 6)] * 8)
    assert tiles.shared is None
    tiles.write([(0, 20)] * 8)
    assert tiles.shared is not None
    tiles.write([])
    assert tiles.shared is None
