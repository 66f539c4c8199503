"""Newer weights that are offered to an engine while it samples."""

from typing import Protocol


class Offers(Protocol):
    """What an engine asks between two tokens."""

    def has_newer(self, version: int) -> bool:
        """Whether there is a version to take over; asked often, so it must cost nothing."""
        ...

    def apply(self) -> None:
        """Load the newest version into the engine and check it; the engine is at rest."""
        ...
