"""Several ranks that train together, each in an actor; the first one has the engines."""

import io
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from pickle import PicklingError
from typing import Any

import ray
import torch
from ray.cloudpickle.cloudpickle import Pickler
from ray.exceptions import GetTimeoutError, RayTaskError
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from trustbatch.cluster.actor_pool import DEATHS
from trustbatch.cluster.driver import IsAskedToStop, Result, Train
from trustbatch.cluster.placement import Places, machines
from trustbatch.config import Config
from trustbatch.errors import ConfigError, EngineError, TrustbatchError
from trustbatch.plan.demand import Demand
from trustbatch.tasks import Task
from trustbatch.tasks.problems import ProblemTask
from trustbatch.utils.distributed import DEADLINE, joined_ranks
from trustbatch.utils.network import listen_at, use_interface_of

LOOK_EVERY = 1.0
HEARD_LATER = 5.0
"""seconds until the death of a process that other ranks have noticed is known to Ray"""
STOP_FILE = "stop"
"""is in the run folder, which all machines see, while the trainers are asked to stop"""


class TrainerActor:
    """One rank."""

    def __init__(self, rank: int, num_ranks: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        # Ray shows it one GPU only: it is the first of its kind wherever it runs
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        use_interface_of(ray.util.get_node_ip_address())
        self.rank, self.num_ranks = rank, num_ranks
        self._listener: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Return where ranks of several machines can meet: by Ray's address of this one only."""
        address = ray.util.get_node_ip_address()
        self._listener = listen_at(address)
        return address, self._listener.getsockname()[1]

    def train(
        self,
        train: Train[Result],
        config: Config,
        task: Task | None,
        meet_at: Path | tuple[str, int],
    ) -> Result:
        """Meet the other ranks, at a file or an address, and train with them."""
        with joined_ranks(config.model.device, store=self._store(meet_at)):
            return train(config, task, (config.run.path / STOP_FILE).exists)

    def _store(self, meet_at: Path | tuple[str, int]) -> Store:
        if isinstance(meet_at, Path):
            return FileStore(str(meet_at), self.num_ranks)
        return TCPStore(
            *meet_at,
            world_size=self.num_ranks,
            is_master=self.rank == 0,
            timeout=DEADLINE,
            wait_for_workers=False,
            # without one the store would listen to the whole network
            master_listen_fd=self._listener.detach() if self._listener else None,
        )


def train_together(
    config: Config, task: Task | None, train: Train[Result], is_asked_to_stop: IsAskedToStop | None
) -> Result:
    """Train on `cluster.trainers` ranks; if one of them ends, all do, and a sentence says why."""
    cluster = config.cluster
    assert cluster is not None
    if task is not None:
        refuse_unsendable(task)
    remote: Any = ray.remote(TrainerActor)
    bundles = Demand.of(config, machines()).trainers
    places = Places(bundles, seconds=cluster.start_seconds)
    stop_file = config.run.path / STOP_FILE

    def hand_on_request() -> None:
        # again and again: at first there may be no folder yet
        if is_asked_to_stop is not None and is_asked_to_stop() and stop_file.parent.is_dir():
            stop_file.touch()

    with tempfile.TemporaryDirectory(prefix="trustbatch-ranks-") as folder:
        try:
            stop_file.unlink(missing_ok=True)  # of a start that was killed
            num_threads = torch.get_num_threads()
            actors = [
                remote.options(**places.options(rank)).remote(rank, cluster.trainers, num_threads)
                for rank in range(cluster.trainers)
            ]
            # on one machine they meet in a file: a store would listen to the whole network
            meet_at = Path(folder) / "meeting"
            if cluster.address:
                meet_at = _listening(actors[0], cluster.start_seconds)
            calls = [actor.train.remote(train, config, task, meet_at) for actor in actors]
            return _first_result(calls, meanwhile=hand_on_request)
        finally:
            places.close()  # which ends the trainers, and so the engines
            stop_file.unlink(missing_ok=True)


def _listening(actor: Any, seconds: float) -> tuple[str, int]:
    try:
        return ray.get(actor.listen.remote(), timeout=seconds)
    except GetTimeoutError as error:
        raise EngineError(
            f"The first trainer did not start within {seconds:.0f} seconds: raise "
            "cluster.start_seconds, or see what holds it up in Ray's logs."
        ) from error
    except DEATHS as error:
        raise EngineError(
            "The first trainer died before it began: see why in Ray's logs."
        ) from error


def _first_result(calls: list[Any], *, meanwhile: Callable[[], None]) -> Any:
    """Wait for all ranks; returns what the first one did. `meanwhile` is called again and again."""
    waiting = list(calls)
    while waiting:
        meanwhile()
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
            except DEATHS:
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
        except DEATHS as error:
            raise EngineError(
                f"Trainer {calls.index(call)} died: see why in Ray's logs; the same command "
                "continues the run from its last checkpoint."
            ) from error


def refuse_unsendable(task: Task) -> None:
    """Refuse a task that can't be pickled, or would arrive without its problems."""
    found = _TaskPickler(io.BytesIO())
    try:
        found.dump(task)
    except (TypeError, PicklingError) as error:
        raise ConfigError(
            f"The task {task.name!r} can't be sent to other trainers ({error}): give it as a "
            "table, or set cluster.trainers to 1."
        ) from error
    if found.problem_task is not None:
        raise ConfigError(
            f"The task {found.problem_task!r} leaves its problems behind when it is sent to other "
            'trainers: give it as a table, such as task={"name": "file", "path": ...}.'
        )


class _TaskPickler(Pickler):
    """Pickles a task as Ray will, and finds tasks with problems inside it."""

    problem_task: str | None = None

    def persistent_id(self, value: Any) -> None:
        """Remember a task with problems; pickle calls this for every object."""
        if isinstance(value, ProblemTask):
            self.problem_task = value.name
