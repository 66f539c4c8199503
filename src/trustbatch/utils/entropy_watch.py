"""A warning when a policy becomes random."""

from collections.abc import Mapping

ENTROPY_FACTOR = 2.0
ENTROPY_NATS = 1.0
"""a collapsing policy exceeds both limits; learning alone lowers the entropy"""


class EntropyWatch:
    """Warns once when the policy's entropy has risen far above that of the first step.

    1-ESS cannot show this where policy and data become random together.
    """

    def __init__(self, first: Mapping[str, float] | None = None, *, settings: str) -> None:
        """`first` has the metrics of the run's first step; `settings` are what to lower."""
        self._first = (first or {}).get("entropy")
        self._settings = settings
        self._has_warned = False

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return the warning after a step, if there is one."""
        entropy = metrics.get("entropy")
        if entropy is None or self._has_warned:
            return None
        if self._first is None:
            self._first = entropy
        if entropy < ENTROPY_FACTOR * self._first or entropy < self._first + ENTROPY_NATS:
            return None
        self._has_warned = True
        return (
            f"Entropy has risen from {self._first:.1f} to {entropy:.1f} nats per token since the "
            "first step: the policy is becoming random, and 1-ESS can't show it where the data "
            f"becomes random too. Lower {self._settings}."
        )
