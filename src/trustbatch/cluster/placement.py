"""Room for the processes of a run: a bundle of what Ray has for each of them."""

from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trustbatch.errors import EngineError
from trustbatch.plan.demand import Bundles, Resources, amounts
from trustbatch.utils.terminal import LiveLine

QUIET_SECONDS = 5.0
"""how long a wait for room is not worth a line"""


class Places:
    """Holds a bundle for each process of a kind, from before they start until all have ended.

    A process that takes the place of a dead one gets its bundle, with the same GPUs; Ray starts it
    as soon as nothing is left of the other.
    """

    def __init__(self, bundles: Bundles, *, seconds: float, spread: bool = False) -> None:
        self.bundles = bundles
        self._group = placement_group(
            [bundles.each] * bundles.size, strategy="SPREAD" if spread else "PACK"
        )
        try:
            self._await(seconds)
        except BaseException:
            self.close()
            raise

    def options(self, number: int) -> dict[str, Any]:
        """Return with which options the actor of that number is to be started."""
        return {
            "num_cpus": 1,
            "num_gpus": self.bundles.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
        }

    def close(self) -> None:
        """Give the room back, which ends whoever is still in it."""
        remove_placement_group(self._group)

    def _await(self, seconds: float) -> None:
        if self._group.wait(min(seconds, QUIET_SECONDS)):
            return
        line = LiveLine()
        line.show(f"Waiting for Ray to make room for {self.bundles}")
        if not self._group.wait(max(seconds - QUIET_SECONDS, 0.0)):
            raise EngineError(
                f"Ray has made no room within {seconds:.0f} seconds (cluster.start_seconds) for "
                f"{self.bundles}: of {amounts(ray.cluster_resources())} in all, "
                f"{amounts(ray.available_resources())} are free; lower {self.bundles.key}, or "
                "wait until others have ended."
            )
        line.show(f"Ray has made room for {self.bundles}", last=True)


def machines() -> list[Resources]:
    """Return the resources of every machine that Ray has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
