"""Several ranks that train together, each in an actor; the first one has the engines."""

import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from trustbatch.cluster.driver import Train
from trustbatch.cluster.placement import Places, machines
from trustbatch.config import Config
from trustbatch.errors import ConfigError, EngineError, TrustbatchError
from trustbatch.plan.demand import Demand
from trustbatch.ranks import joined_ranks
from trustbatch.tasks import Task
from trustbatch.tasks.problems import ProblemTask

if TYPE_CHECKING:
    from trustbatch.api import RunResult

LOOK_EVERY = 1.0
HEARD_LATER = 5.0
"""seconds until the death of a process that other ranks have noticed is known to Ray"""


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
    remote: Any = ray.remote(TrainerActor)
    bundles = Demand.of(config, machines()).trainers
    places = Places(bundles, seconds=cluster.start_seconds)
    with tempfile.TemporaryDirectory(prefix="trustbatch-ranks-") as folder:
        try:
            num_threads = torch.get_num_threads()
            actors = [
                remote.options(**places.options(rank)).remote(rank, cluster.trainers, num_threads)
                for rank in range(cluster.trainers)
            ]
            # on one machine they meet in a file: a store would listen to the whole network
            meet_at = (Path(folder) / "meeting").as_uri()
            if cluster.address:
                meet_at = ray.get(actors[0].free_address.remote(), timeout=cluster.start_seconds)
            calls = [actor.train.remote(train, config, task, meet_at) for actor in actors]
            return _first_result(calls)
        finally:
            places.close()  # which ends the trainers, and so the engines


def _first_result(calls: list[Any]) -> "RunResult":
    """Wait for all ranks; returns what the first one did."""
    waiting = list(calls)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=LOOK_EVERY)
        for call in done:
            try:
                ray.get(call)
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, TrustbatchError | OSError):
                    raise cause from error
                _raise_death(calls)  # of which this one may only have heard
                raise
            except RayActorError:
                _raise_death(calls)
    return ray.get(calls[0])


def _raise_death(calls: list[Any]) -> None:
    """Say which rank has died, if one has; Ray may learn of it after the others."""
    ended, _ = ray.wait(calls, num_returns=len(calls), timeout=HEARD_LATER)
    for call in ended:
        try:
            ray.get(call)
        except RayTaskError:
            continue
        except RayActorError as error:
            raise EngineError(
                f"Trainer {calls.index(call)} died: see why in Ray's logs; the same command "
                "continues the run from its last checkpoint."
            ) from error
