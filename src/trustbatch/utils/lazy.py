"""A sequence whose items are made when they are first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

Item = TypeVar("Item")
Other = TypeVar("Other")


class LazySequence(Sequence[Item]):
    """Makes each item once, and keeps it."""

    def __init__(self, makers: Sequence[Callable[[], Item]]) -> None:
        self._makers = makers
        self._made: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, number: int) -> Item: ...
    @overload
    def __getitem__(self, number: slice) -> list[Item]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        number = range(len(self))[number]
        if number not in self._made:
            self._made[number] = self._makers[number]()
        return self._made[number]

    def __iter__(self) -> Iterator[Item]:
        return (self[number] for number in range(len(self)))

    def mapped(self, function: Callable[[Item], Other]) -> LazySequence[Other]:
        """Return the results of a function of each item; items themselves are not kept for it."""
        return LazySequence([functools.partial(_call, function, make) for make in self._makers])


def _call(function: Callable[[Item], Other], make: Callable[[], Item]) -> Other:
    return function(make())
