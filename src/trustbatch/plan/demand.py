"""What a run with [cluster] needs: Ray resources, and GPU memory for published weights."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trustbatch.config import Config
from trustbatch.models.loading import default_precision
from trustbatch.plan.memory import FLOAT32, Lora
from trustbatch.plan.outline import ModelOutline
from trustbatch.rollout.registry import engine_info

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Bundles:
    """The Ray resources of all processes of one kind."""

    kind: str
    """name of one of them"""
    key: str
    """configuration key of their number"""
    size: int
    gpus: float = 0.0
    gpu_key: str = ""
    """configuration key of the GPUs of each; empty if that is always one"""

    @property
    def each(self) -> dict[str, float]:
        """Resources of one process, which must be on one machine."""
        return {"CPU": 1.0} | ({"GPU": self.gpus} if self.gpus else {})

    def __str__(self) -> str:
        return f"{self.key} = {self.size} with {amounts(self.each, self.each)} each"


@dataclass(frozen=True)
class Demand:
    """All Ray resources of a run."""

    trainers: Bundles
    """none for a single trainer, which is the process that was started"""
    engines: Bundles
    reward_workers: Bundles

    @classmethod
    def of(cls, config: Config, nodes: Sequence[Resources]) -> "Demand":
        """Return what a run needs from machines with these resources."""
        cluster = config.cluster
        assert cluster is not None
        num_gpus = sum(node.get("GPU", 0.0) for node in nodes)
        if config.model.device == "cpu":
            num_gpus = 0.0
        # an existing Ray cluster does not know about GPUs used outside of it
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
                gpus_per_engine = _share(cluster.engines)  # all on the only GPU
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
        """Kinds with at least one process."""
        return [kind for kind in (self.trainers, self.engines, self.reward_workers) if kind.size]

    @property
    def num_gpus(self) -> float:
        """Number of GPUs of all processes that Ray places."""
        return sum(kind.size * kind.gpus for kind in self.kinds)

    def obstacle(self, nodes: Sequence[Resources]) -> str | None:
        """Return why these machines can't run all processes at once; None if they can."""
        for resource in ("GPU", "CPU"):
            in_all = sum(node.get(resource, 0.0) for node in nodes)
            largest = max(node.get(resource, 0.0) for node in nodes)
            kinds = [kind for kind in self.kinds if kind.each.get(resource)]
            needed = sum(kind.size * kind.each[resource] for kind in kinds)
            if needed > in_all:
                return (
                    f"Ray has {in_all:g} {resource} in all, and the run needs {needed:g} "
                    f"({', '.join(map(str, kinds))}): lower "
                    f"{' or '.join(kind.key for kind in kinds)}, or add machines."
                )
            for kind in kinds:
                if kind.each[resource] > largest:
                    return (
                        f"Each {kind.kind} needs {kind.each[resource]:g} {resource} on one "
                        f"machine, and the largest has {largest:g}: lower "
                        f"{kind.gpu_key or kind.key}."
                    )
        return None


def gpus_needed(config: Config) -> int:
    """Return the number of GPUs with which every process that can use one has one."""
    assert config.cluster is not None
    demand = Demand.of(config, [{"GPU": math.inf}])
    return math.ceil(demand.num_gpus) + (0 if demand.trainers.size else 1)


def seen_by_ray(config: Config, num_gpus: float) -> list[Resources]:
    """Return Ray's resources on a machine with `num_gpus` GPUs and enough CPUs."""
    assert config.cluster is not None
    # a single trainer keeps the first GPU if there are several
    if config.cluster.trainers == 1 and not config.cluster.address and num_gpus > 1:
        num_gpus -= 1
    return [{"CPU": math.inf, "GPU": num_gpus}]


def amounts(resources: Resources, keys: Iterable[str] = ("CPU", "GPU")) -> str:
    """Format resources."""
    return " and ".join(f"{resources.get(key, 0.0):g} {key}" for key in keys)


def _share(number: int) -> float:
    """Return 1/number rounded down to Ray's unit of 1/10,000, so that all of them fit."""
    return math.floor(10_000 / number) / 10_000


def published_bytes(config: Config, outline: ModelOutline) -> float:
    """Return the bytes of the weight versions that a direct transfer keeps on the trainer's GPU."""
    assert config.cluster is not None
    precision = config.rollout.precision
    if precision == "auto":
        precision = config.model.precision
    if precision == "auto":
        precision = default_precision("cuda")
    info, lora = engine_info(config.rollout.engine), config.model.lora
    rounded = info.weight_dtype(precision)
    num_parameters = outline.num_parameters
    if lora is not None and info.loads_adapters(info.table(config.rollout)):
        adapters = Lora.of(lora)
        num_parameters = outline.adapter_parameters(adapters.rank, adapters.targets)
    # the versions that engines may request, and one about to be replaced
    num_versions = config.cluster.max_lag + 2
    return num_versions * (FLOAT32 if rounded is None else rounded.itemsize) * num_parameters
