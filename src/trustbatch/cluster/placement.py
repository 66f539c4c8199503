"""Placement of the processes of a run: a bundle of Ray's resources for each."""

from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trustbatch.errors import EngineError
from trustbatch.plan.demand import Bundles, Resources, amounts
from trustbatch.utils.terminal import LiveLine

QUIET_SECONDS = 5.0
"""of waiting before a line says so"""


class Places:
    """Reserves a bundle for each process of a kind, from before they start until all have ended.

    A process that replaces a dead one gets its bundle, with the same GPUs; Ray starts it as soon as
    the dead one has released them.
    """

    def __init__(self, bundles: Bundles, *, seconds: float, spread: bool = False) -> None:
        self.bundles = bundles
        self._group = placement_group(
            [bundles.each] * bundles.size, strategy="SPREAD" if spread else "PACK"
        )
        try:
            self._wait(seconds)
        except BaseException:
            self.close()
            raise

    def options(self, index: int) -> dict[str, Any]:
        """Return the Ray options of the actor with this index."""
        return {
            "num_cpus": 1,
            "num_gpus": self.bundles.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        }

    def close(self) -> None:
        """Release the bundles, which kills the actors in them."""
        remove_placement_group(self._group)

    def _wait(self, seconds: float) -> None:
        if self._group.wait(min(seconds, QUIET_SECONDS)):
            return
        line = LiveLine()
        line.show(f"Waiting for Ray to place {self.bundles}")
        if not self._group.wait(max(seconds - QUIET_SECONDS, 0.0)):
            raise EngineError(
                f"Timed out after {seconds:.0f} seconds (cluster.start_seconds): Ray can't place "
                f"{self.bundles}; of {amounts(ray.cluster_resources())} in total, "
                f"{amounts(ray.available_resources())} are free; lower {self.bundles.key}, or "
                "wait until other runs have ended."
            )
        line.show(f"Ray has placed {self.bundles}", last=True)


def machines() -> list[Resources]:
    """Return the resources of every machine of the Ray cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
