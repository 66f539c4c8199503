"""A pool: actors of one kind that work off a list of chunks, whoever of them dies meanwhile."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from trustbatch.errors import DeadEngineError, EngineError, TrustbatchError

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""seconds between looks at deadlines, and at whether the run has been stopped"""
DEATHS = (RayActorError, OutOfMemoryError)
"""what Ray raises for a call whose actor is no more; the second if Ray itself has ended it"""
LOSSES = (*DEATHS, ObjectLostError, DeadEngineError)
"""after which the same work is worth another actor; the last if it lives, but not what it needs"""


class Stopped(TrustbatchError):
    """The pool was closed while it worked."""


@dataclass
class Worker:
    """One place in a pool: the actor that has it now, and what became of those before."""

    kind: str
    number: int
    actor: Any
    is_ready: bool = False
    restarts: int = 0
    chunk: int | None = None
    """what it works on"""
    since: float = 0.0
    busy_seconds: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)
    """what the owner of the pool counts for it"""

    @property
    def name(self) -> str:
        """What it is called where a person reads it."""
        return f"{self.kind} {self.number}"


Work = Callable[[Any, Any], Any]
Note = Callable[[Worker, Any], None]


class ActorPool:
    """Deals chunks of work to idle actors and puts the results back in order.

    An actor that dies, is silent beyond its deadline, or has lost a process of its own without
    which it can't work, is replaced by a new one, and its chunk is queued again, once for each
    death: before all others, since they waited for less. A chunk whose actors die more than
    `max_restarts` times ends the run. Other errors that the work itself raises are raised here.
    `drop_engine` is told of each actor that is replaced.
    """

    def __init__(
        self,
        kind: str,
        start: Callable[[int], Any],
        *,
        size: int,
        start_seconds: float,
        work_seconds: float,
        max_restarts: int,
        deadline_key: str,
        drop_engine: Callable[[Any], None] = lambda actor: None,
    ) -> None:
        self.kind = kind
        self._start = start
        self.start_seconds = start_seconds
        self.work_seconds = work_seconds
        self.max_restarts = max_restarts
        self.deadline_key = deadline_key
        self._part_from = drop_engine
        self.last_death = ""
        """who had to be replaced last, and why"""
        self.died = 0.0
        """when that was, by the monotonic clock"""
        self._closed = threading.Event()
        self._working = threading.Lock()  # a batch and, say, an evaluation come one by one
        self.workers = [Worker(kind, number, self._started(number)) for number in range(size)]

    @property
    def restarts(self) -> int:
        """Actors that were replaced so far."""
        return sum(worker.restarts for worker in self.workers)

    def run(
        self,
        chunks: Sequence[Any],
        work: Callable[[Any, Any], Any],
        note: Callable[[Worker, Any], None],
    ) -> list[Any]:
        """Return the result of each chunk.

        `work(actor, chunk)` calls an actor, `note(worker, result)` is told what came of it.
        """
        with self._working:
            return self._run(chunks, work, note)

    def close(self) -> None:
        """End all actors, and whatever is being worked on."""
        self._closed.set()
        for worker in self.workers:
            ray.kill(worker.actor)

    def _run(
        self,
        chunks: Sequence[Any],
        work: Callable[[Any, Any], Any],
        note: Callable[[Worker, Any], None],
    ) -> list[Any]:
        waiting = deque(range(len(chunks)))
        deaths = [0] * len(chunks)
        results: list[Any] = [None] * len(chunks)
        calls: dict[Any, Worker] = {}
        missing = len(chunks)
        try:
            while missing:
                # those that still load their model come last
                for worker in sorted(self.workers, key=lambda worker: not worker.is_ready):
                    if worker.chunk is None and waiting:
                        worker.chunk = waiting.popleft()
                        worker.since = time.monotonic()
                        calls[work(worker.actor, chunks[worker.chunk])] = worker
                done, _ = ray.wait(list(calls), timeout=LOOK_EVERY)
                if self._closed.is_set():
                    raise Stopped(f"The {self.kind}s were closed while they worked.")
                for call in done or self._silent(calls):
                    worker = calls.pop(call)
                    number, worker.chunk = worker.chunk, None
                    assert number is not None
                    try:
                        if not done:
                            raise RayActorError(error_msg=f"no answer within {self.deadline_key}")
                        results[number] = _result(call)
                    except LOSSES as error:
                        deaths[number] += 1
                        self._replace(worker, deaths[number], error)
                        waiting.appendleft(number)
                        continue
                    worker.is_ready = True
                    worker.busy_seconds += time.monotonic() - worker.since
                    note(worker, results[number])
                    missing -= 1
        finally:
            # after an error of one, what the others still do is of no use to anybody
            for call, worker in calls.items():
                ray.cancel(call)
                worker.chunk = None
        return results

    def _silent(self, calls: dict[Any, Worker]) -> list[Any]:
        """Return the calls that have taken longer than they may."""
        now = time.monotonic()
        late = []
        for call, worker in calls.items():
            allowed = self.work_seconds + (0.0 if worker.is_ready else self.start_seconds)
            if now - worker.since > allowed:
                late.append(call)
        return late

    def _replace(self, worker: Worker, deaths: int, error: Exception) -> None:
        """Put a new actor into the place of one that is dead or silent."""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        if deaths > self.max_restarts:
            raise EngineError(
                f"{deaths} processes in a row ended over the same work of {worker.name} ({reason}):"
                " see why in Ray's logs, or raise cluster.max_restarts; the same command continues "
                "the run."
            ) from error
        self.last_death = f"{worker.name} is replaced: {reason}."
        self.died = time.monotonic()
        logger.warning(self.last_death)
        ray.kill(worker.actor)
        self._part_from(worker.actor)
        worker.restarts += 1
        worker.is_ready = False
        worker.actor = self._started(worker.number)

    def _started(self, number: int) -> Any:
        actor = self._start(number)
        actor.prepare.remote()  # not awaited: what goes wrong there goes wrong again at work
        return actor


def _result(call: Any) -> Any:
    """Return what a call gave; an error of the actor's code loses Ray's words if it has its own."""
    try:
        return ray.get(call)
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, TrustbatchError | OSError) else error) from error
