"""Room for the processes of a run: what they ask Ray for, and a bundle of it for each of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trustbatch.config import Config
from trustbatch.errors import ConfigError, EngineError
from trustbatch.observe.progress import LiveLine

QUIET_SECONDS = 5.0
"""how long a wait for room is not worth a line"""

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Bundles:
    """What each process of one kind asks for."""

    kind: str
    """what one of them is called"""
    key: str
    """of the configuration: how many there are"""
    size: int
    gpus: float = 0.0
    gpu_key: str = ""
    """of the configuration: how many GPUs each has; none where that is always one"""

    @property
    def each(self) -> dict[str, float]:
        """One bundle; it lies on one machine."""
        return {"CPU": 1.0} | ({"GPU": self.gpus} if self.gpus else {})

    def __str__(self) -> str:
        return f"{self.key} = {self.size} with {_amounts(self.each, self.each)} each"


@dataclass(frozen=True)
class Demand:
    """All that a run asks Ray for."""

    trainers: Bundles
    """a single one is the process that was started, for which nothing is asked"""
    engines: Bundles
    reward_workers: Bundles

    @classmethod
    def of(cls, config: Config, nodes: Sequence[Resources]) -> "Demand":
        """Return what a run asks machines of these resources for."""
        cluster = config.cluster
        assert cluster is not None
        num_gpus = sum(node.get("GPU", 0.0) for node in nodes)
        if config.model.device == "cpu":
            num_gpus = 0.0
        # a cluster's own Ray does not know of a GPU that is used beside it
        is_placed = cluster.trainers > 1 or (cluster.address and num_gpus > 1)
        num_trainers = cluster.trainers if is_placed else 0
        is_divided = config.rollout.engine == "vllm" and cluster.engine_gpus is None
        whole = config.rollout.vllm.tensor_parallel if is_divided else 1
        gpus_per_engine = cluster.engine_gpus
        if gpus_per_engine is None:
            gpus_per_engine = float(whole) if num_gpus else 0.0
            if not is_placed and num_gpus == whole == 1:
                gpus_per_engine = _share(cluster.engines)  # all on the only one
        return cls(
            trainers=Bundles(
                "trainer", "cluster.trainers", num_trainers, gpus=1.0 if num_gpus else 0.0
            ),
            engines=Bundles(
                "engine",
                "cluster.engines",
                cluster.engines,
                gpus=gpus_per_engine,
                gpu_key="rollout.vllm.tensor_parallel" if is_divided else "cluster.engine_gpus",
            ),
            reward_workers=Bundles(
                "reward worker", "cluster.reward_workers", cluster.reward_workers
            ),
        )

    def refuse_what_never_fits(self, nodes: Sequence[Resources]) -> None:
        """Raise if machines of these resources could not hold all processes at once."""
        kinds = [kind for kind in (self.trainers, self.engines, self.reward_workers) if kind.size]
        for resource in ("GPU", "CPU"):
            in_all = sum(node.get(resource, 0.0) for node in nodes)
            largest = max(node.get(resource, 0.0) for node in nodes)
            asking = [kind for kind in kinds if kind.each.get(resource)]
            wanted = sum(kind.size * kind.each[resource] for kind in asking)
            if wanted > in_all:
                raise ConfigError(
                    f"Ray has {in_all:g} {resource} in all, and the run needs {wanted:g} "
                    f"({', '.join(map(str, asking))}): lower "
                    f"{' or '.join(kind.key for kind in asking)}, or add machines."
                )
            for kind in asking:
                if kind.each[resource] > largest:
                    raise ConfigError(
                        f"Each {kind.kind} needs {kind.each[resource]:g} {resource} on one "
                        f"machine, and the largest has {largest:g}: lower "
                        f"{kind.gpu_key or kind.key}."
                    )


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
                f"{self.bundles}: of {_amounts(ray.cluster_resources())} in all, "
                f"{_amounts(ray.available_resources())} are free; lower {self.bundles.key}, or "
                "wait until others have ended."
            )
        line.show(f"Ray has made room for {self.bundles}", last=True)


def machines() -> list[Resources]:
    """Return the resources of every machine that Ray has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _amounts(resources: Resources, keys: Iterable[str] = ("CPU", "GPU")) -> str:
    return " and ".join(f"{resources.get(key, 0.0):g} {key}" for key in keys)


def _share(number: int) -> float:
    """Return a part of one, so that as many of them as asked for fit: Ray counts in 1/10,000."""
    return math.floor(10_000 / number) / 10_000
