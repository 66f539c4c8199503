"""Items of a lazy sequence are made once, when they are asked for."""

import functools

import pytest

from trustbatch.utils.lazy import LazySequence


def test_items_are_made_when_they_are_asked_for_and_kept() -> None:
    made: list[int] = []

    def make(number: int) -> list[int]:
        made.append(number)
        return [number]

    items = LazySequence([functools.partial(make, number) for number in range(4)])
    assert len(items) == 4
    assert made == []
    assert items[-1] is items[3]
    assert made == [3]
    assert items[:2] == [[0], [1]]
    assert list(items) == [[0], [1], [2], [3]]
    assert sorted(made) == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        items[4]


def test_a_function_of_the_items_is_called_once_for_each() -> None:
    calls: list[int] = []
    items = LazySequence([functools.partial(int, text) for text in ("7", "8")])
    doubled = items.mapped(lambda number: calls.append(number) or 2 * number)
    assert calls == []
    assert [doubled[1], *doubled] == [16, 14, 16]
    assert calls == [8, 7]
    assert items._made == {}  # they would stay in memory beside the results
