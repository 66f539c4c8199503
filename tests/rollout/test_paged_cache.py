"""The pool of pages grows as far as there is room beside what prompts and steps need."""

import pytest
import torch

pytest.importorskip("triton")

from trustbatch.models.policy import Policy
from trustbatch.rollout.native import workspace
from trustbatch.rollout.native.architecture import read_architecture
from trustbatch.rollout.native.cache import PAGE, CacheFullError, Heads
from trustbatch.rollout.native.paged_cache import PagedCache
from trustbatch.rollout.native.workspace import Workspace

LAYERS = 3
IN_LAYER = 4 * 2 * PAGE * 8
"""bytes of the keys of a page in one layer: float32, two heads of dimension 8"""


class Room:
    """What is left of a device on which the cache has its pool."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.cache: PagedCache | None = None
        self.most_rows = 0

    def __call__(self, num_rows: int) -> float:
        self.most_rows = max(self.most_rows, num_rows)
        assert self.cache is not None
        return self.num_bytes - self.cache.num_pages * 2 * LAYERS * IN_LAYER


LONG = 100 * PAGE
"""tokens that a row may still get"""


def make_cache(num_bytes: int) -> PagedCache:
    room = Room(num_bytes)
    heads = Heads(num_query=2, num_kv=2, dim=8, epsilon=1e-6)
    room.cache = PagedCache(
        heads, LAYERS, torch.float32, device=torch.device("cpu"), max_rows=8, room=room
    )
    return room.cache


def test_a_pool_takes_what_there_is_and_no_more() -> None:
    # ten pages, and the keys of ten pages in one layer once more while they are copied
    cache = make_cache(10 * (2 * LAYERS + 1) * IN_LAYER)
    cache.add_prompts([3 * PAGE], [2])
    cache.finish_prompts()
    assert cache.num_pages == 1 + 3 + 2
    for _ in range(2):  # each row gets two pages more
        cache.reserve(PAGE, LONG)
        cache.advance(PAGE)
    assert cache.num_pages == 9  # half as many again as before, which is more than needed
    cache.reserve(0, LONG)
    cache.keep([0])
    for _ in range(3):
        cache.reserve(PAGE, LONG)
        cache.advance(PAGE)
    cache.reserve(PAGE, LONG)
    cache.advance(PAGE)
    assert cache.num_pages == 10  # half as many again would be 13
    with pytest.raises(CacheFullError):
        cache.reserve(PAGE, LONG)
    assert cache.num_pages == 10
    assert {len(pool) for pool in (*cache.keys, *cache.values)} == {10}
    assert isinstance(cache.room, Room)
    assert cache.room.most_rows == 2


def test_a_pool_grows_no_further_than_its_rows_can_need() -> None:
    cache = make_cache(100 * (2 * LAYERS + 1) * IN_LAYER)
    cache.add_prompts([20 * PAGE], [2])
    cache.finish_prompts()
    assert cache.num_pages == 1 + 20 + 2  # twenty are shared, and each row is to write one
    cache.reserve(2 * PAGE, 3 * PAGE)
    assert cache.num_pages == 1 + 20 + 2 * 3  # half as many again would be 34
    cache.reserve(3 * PAGE, 3 * PAGE)
    assert cache.num_pages == 1 + 20 + 2 * 3


def test_the_table_names_the_pages_of_each_row() -> None:
    cache = make_cache(100 * (2 * LAYERS + 1) * IN_LAYER)
    cache.add_prompts([PAGE + 3, 2 * PAGE], [2, 1])
    cache.finish_prompts()
    for number, steps in enumerate((1, PAGE, 5, 2 * PAGE, 3 * PAGE)):
        cache.reserve(steps, LONG)
        for row, pages in enumerate(cache.rows):
            assert len(pages) >= (cache.lengths[row] + steps) / PAGE
            assert cache.table[row, : len(pages)].tolist() == pages
        cache.advance(steps)
        if number == 2:
            cache.keep([2, 0])


def test_a_cleared_cache_is_as_wide_as_the_longest_row_was() -> None:
    cache = make_cache(100 * (2 * LAYERS + 1) * IN_LAYER)
    addresses = []
    for _ in range(2):
        cache.add_prompts([PAGE], [2])
        cache.finish_prompts()
        before = cache.address
        for _ in range(8):
            cache.reserve(PAGE, 8 * PAGE)
            cache.advance(PAGE)
        addresses.append(cache.address - before)
        cache.clear()
    assert addresses[1] <= 1 < addresses[0]  # each address is a CUDA graph captured anew


def test_prompts_that_are_given_up_leave_their_pages() -> None:
    cache = make_cache(10 * (2 * LAYERS + 1) * IN_LAYER)
    cache.add_prompts([3 * PAGE, 5], [1, 2])
    cache.drop_prompts()
    cache.add_prompts([5 * PAGE], [4])
    cache.finish_prompts()
    assert cache.num_pages == 10
    assert len({page for row in cache.rows for page in row}) == 5


def test_few_prompts_at_a_time_where_memory_is_short(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = read_architecture(policy.model)
    assert architecture is not None
    each = Workspace(architecture, torch.device("cuda"))
    # width 128: residual twice in float32, two in bfloat16; MLP 256: gate, up and their product
    assert each.per_token == 128 * (4 + 4 + 2 + 2) + 256 * 3 * 2
    assert each.num_bytes(10) == 16384 * each.per_token + 10 * 4 * 4 * 16 + 2**28
    free = 8 * 4000 * each.per_token
    monkeypatch.setattr(workspace, "free_memory", lambda _: free)
    each.fit()
    assert each.prefill_tokens == 4000
    assert each.room_for_cache(0) == 7 * 4000 * each.per_token - 2**28
    free = 8
    each.fit()
    assert each.prefill_tokens == 2048
    free = 1e12
    each.fit()
    assert each.prefill_tokens == 16384
