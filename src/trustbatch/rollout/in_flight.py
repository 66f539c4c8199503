"""Newer weights that are offered to an engine while it draws."""

from typing import Protocol


class Offers(Protocol):
    """What an engine asks between two tokens."""

    def are_newer_than(self, version: int) -> bool:
        """Whether there is a version to take over; asked often, so it must cost nothing."""
        ...

    def take_over(self) -> None:
        """Load the newest version into the engine and check it; the engine is at rest."""
        ...
