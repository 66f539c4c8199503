"""A look at what 1-ESS can't see: policy and data that become random together."""

from collections.abc import Mapping

FACTOR = 2.0
NATS = 1.0
"""both are exceeded by a policy that is coming apart; learning alone lowers the entropy"""


class EntropyWatch:
    """Notices once that the policy's entropy has risen far above that of the first step."""

    def __init__(self, first: Mapping[str, float] | None = None) -> None:
        self._first = (first or {}).get("entropy")
        self._has_spoken = False

    def remark(self, metrics: Mapping[str, float]) -> str | None:
        """Return what to say after a step, if anything."""
        entropy = metrics.get("entropy")
        if entropy is None or self._has_spoken:
            return None
        if self._first is None:
            self._first = entropy
        if entropy < FACTOR * self._first or entropy < self._first + NATS:
            return None
        self._has_spoken = True
        return (
            f"Entropy has risen from {self._first:.1f} to {entropy:.1f} nats a token since the "
            "first step: the policy is becoming random, and 1-ESS can't see it where the data does "
            "too. Lower rollout.temperature or training.learning_rate."
        )
