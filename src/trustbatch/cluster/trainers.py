"""Several ranks that train together, each in an actor; the first one has the engines."""

import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trustbatch.cluster.driver import Train
from trustbatch.config import Config
from trustbatch.errors import ConfigError, EngineError, TrustbatchError
from trustbatch.ranks import joined_ranks
from trustbatch.tasks import Task
from trustbatch.tasks.problems import ProblemTask

if TYPE_CHECKING:
    from trustbatch.api import RunResult

LOOK_EVERY = 1.0
START_SECONDS = 120.0


class TrainerActor:
    """One rank."""

    def __init__(self, rank: int, num_ranks: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        # Ray shows it one GPU only: it is the first of its kind wherever it runs
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def free_address(self) -> str:
        """Return where the ranks of several machines can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, train: Train, config: Config, task: Task | None, meet_at: str) -> "RunResult":
        """Meet the other ranks and train with them."""
        with joined_ranks(config.model.device, meet_at=meet_at):
            return train(config, task)


def train_together(config: Config, task: Task | None, train: Train) -> "RunResult":
    """Train on `cluster.trainers` ranks; if one of them ends, all do, and a sentence says why."""
    cluster = config.cluster
    assert cluster is not None
    if isinstance(task, ProblemTask):
        raise ConfigError(
            f"The task {task.name!r} leaves its problems behind when it is sent to other trainers: "
            'give it as a table, such as task={"name": "file", "path": ...}.'
        )
    uses_gpu = config.model.device != "cpu" and bool(ray.cluster_resources().get("GPU"))
    bundle = {"CPU": 1.0, "GPU": 1.0} if uses_gpu else {"CPU": 1.0}
    group = placement_group([bundle] * cluster.trainers, strategy="PACK")
    remote: Any = ray.remote(TrainerActor)
    with tempfile.TemporaryDirectory(prefix="trustbatch-ranks-") as folder:
        try:
            _await_places(group, bundle, cluster.trainers)
            strategy = PlacementGroupSchedulingStrategy(group)
            options = remote.options(
                num_cpus=1, num_gpus=bundle.get("GPU", 0.0), scheduling_strategy=strategy
            )
            num_threads = torch.get_num_threads()
            actors = [
                options.remote(rank, cluster.trainers, num_threads)
                for rank in range(cluster.trainers)
            ]
            # on one machine they meet in a file: a store would listen to the whole network
            meet_at = (Path(folder) / "meeting").as_uri()
            if cluster.address:
                meet_at = ray.get(actors[0].free_address.remote(), timeout=cluster.start_seconds)
            calls = [actor.train.remote(train, config, task, meet_at) for actor in actors]
            return _first_result(calls)
        finally:
            remove_placement_group(group)  # which ends those who live in it


def _await_places(group: Any, bundle: dict[str, float], num_trainers: int) -> None:
    if not group.wait(START_SECONDS):
        there = {key: ray.cluster_resources().get(key, 0.0) for key in bundle}
        raise EngineError(
            f"Ray found no place for {num_trainers} trainers with {bundle} each within "
            f"{START_SECONDS:.0f} seconds, and has {there} in all: lower cluster.trainers, or add "
            "machines."
        )


def _first_result(calls: list[Any]) -> "RunResult":
    """Wait for all ranks; returns what the first one did."""
    waiting = list(calls)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=LOOK_EVERY)
        for call in done:
            rank = calls.index(call)
            try:
                ray.get(call)
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, TrustbatchError | OSError):
                    raise cause from error
                raise
            except RayActorError as error:
                raise EngineError(
                    f"Trainer {rank} died: see why in Ray's logs; the same command continues the "
                    "run from its last checkpoint."
                ) from error
    return ray.get(calls[0])
