"""What the processes of a run with [cluster] ask Ray for, a bundle each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trustbatch.config import Config
from trustbatch.rollout.registry import engine_info

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
        return f"{self.key} = {self.size} with {amounts(self.each, self.each)} each"


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
        info = engine_info(config.rollout.engine)
        gpu_key, whole = "cluster.engine_gpus", 1
        if cluster.engine_gpus is None and info.gpus_key is not None:
            gpu_key, whole = info.gpus_key, info.num_gpus(info.table(config.rollout))
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
                gpu_key=gpu_key,
            ),
            reward_workers=Bundles(
                "reward worker", "cluster.reward_workers", cluster.reward_workers
            ),
        )

    @property
    def kinds(self) -> list[Bundles]:
        """Those of which there are any."""
        return [kind for kind in (self.trainers, self.engines, self.reward_workers) if kind.size]

    @property
    def num_gpus(self) -> float:
        """GPUs of all processes that Ray places."""
        return sum(kind.size * kind.gpus for kind in self.kinds)

    def obstacle(self, nodes: Sequence[Resources]) -> str | None:
        """Say why machines of these resources can never hold all processes at once, if so."""
        for resource in ("GPU", "CPU"):
            in_all = sum(node.get(resource, 0.0) for node in nodes)
            largest = max(node.get(resource, 0.0) for node in nodes)
            asking = [kind for kind in self.kinds if kind.each.get(resource)]
            wanted = sum(kind.size * kind.each[resource] for kind in asking)
            if wanted > in_all:
                return (
                    f"Ray has {in_all:g} {resource} in all, and the run needs {wanted:g} "
                    f"({', '.join(map(str, asking))}): lower "
                    f"{' or '.join(kind.key for kind in asking)}, or add machines."
                )
            for kind in asking:
                if kind.each[resource] > largest:
                    return (
                        f"Each {kind.kind} needs {kind.each[resource]:g} {resource} on one "
                        f"machine, and the largest has {largest:g}: lower "
                        f"{kind.gpu_key or kind.key}."
                    )
        return None


def gpus_needed(config: Config) -> int:
    """Return on how many GPUs a run has one for each process that can use one."""
    assert config.cluster is not None
    demand = Demand.of(config, [{"GPU": math.inf}])
    return math.ceil(demand.num_gpus) + (0 if demand.trainers.size else 1)


def seen_by_ray(config: Config, num_gpus: float) -> list[Resources]:
    """Return what Ray has on a machine of so many GPUs, with CPUs as it is told."""
    assert config.cluster is not None
    # a single trainer keeps the first one, where there are others
    if config.cluster.trainers == 1 and not config.cluster.address and num_gpus > 1:
        num_gpus -= 1
    return [{"CPU": math.inf, "GPU": num_gpus}]


def amounts(resources: Resources, keys: Iterable[str] = ("CPU", "GPU")) -> str:
    """Return resources in words."""
    return " and ".join(f"{resources.get(key, 0.0):g} {key}" for key in keys)


def _share(number: int) -> float:
    """Return a part of one, so that as many of them as asked for fit: Ray counts in 1/10,000."""
    return math.floor(10_000 / number) / 10_000
