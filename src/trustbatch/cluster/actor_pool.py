"""A pool of Ray actors of one kind that process chunks of work, and replaces dead actors."""

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

POLL_SECONDS = 1.0
"""between checks of deadlines and of whether the pool was closed"""
DEATHS = (RayActorError, OutOfMemoryError)
"""what Ray raises for a call of a dead actor; the second if Ray itself has killed it"""
LOSSES = (*DEATHS, ObjectLostError, DeadEngineError)
"""after which the work is given to another actor; the last if a process of the actor died"""


class Stopped(TrustbatchError):
    """The pool was closed while it was working."""


@dataclass
class Worker:
    """One slot of a pool: its current actor, and counts over all its actors."""

    kind: str
    number: int
    actor: Any
    is_ready: bool = False
    restarts: int = 0
    chunk: int | None = None
    """index of its current chunk; None: idle"""
    since: float = 0.0
    busy_seconds: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)
    """counts kept by the owner of the pool"""

    @property
    def name(self) -> str:
        """Name for logs and errors."""
        return f"{self.kind} {self.number}"


Work = Callable[[Any, Any], Any]
Note = Callable[[Worker, Any], None]


class ActorPool:
    """Gives chunks of work to idle actors and returns the results in order.

    An actor that dies, exceeds its deadline, or loses a process that it needs is replaced, and its
    chunk goes to the front of the queue. A chunk whose actors die more than `max_restarts` times
    ends the run. Other errors of the work itself are raised here. `on_replace` is called with each
    actor that is replaced.
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
        on_replace: Callable[[Any], None] = lambda actor: None,
    ) -> None:
        self.kind = kind
        self._start = start
        self.start_seconds = start_seconds
        self.work_seconds = work_seconds
        self.max_restarts = max_restarts
        self.deadline_key = deadline_key
        self._on_replace = on_replace
        self.last_death = ""
        """the last replaced actor and the reason"""
        self.died = 0.0
        """its time, by the monotonic clock"""
        self._closed = threading.Event()
        self._working = threading.Lock()  # a batch and an evaluation take turns
        self.workers = [Worker(kind, number, self._started(number)) for number in range(size)]

    @property
    def restarts(self) -> int:
        """Number of replaced actors so far."""
        return sum(worker.restarts for worker in self.workers)

    def run(
        self,
        chunks: Sequence[Any],
        work: Callable[[Any, Any], Any],
        note: Callable[[Worker, Any], None],
    ) -> list[Any]:
        """Return the result of each chunk.

        `work(actor, chunk)` calls an actor; `note(worker, result)` is called with its result.
        """
        with self._working:
            return self._run(chunks, work, note)

    def close(self) -> None:
        """Kill all actors and cancel running work."""
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
                # workers that still load their model come last
                for worker in sorted(self.workers, key=lambda worker: not worker.is_ready):
                    if worker.chunk is None and waiting:
                        worker.chunk = waiting.popleft()
                        worker.since = time.monotonic()
                        calls[work(worker.actor, chunks[worker.chunk])] = worker
                done, _ = ray.wait(list(calls), timeout=POLL_SECONDS)
                if self._closed.is_set():
                    raise Stopped(f"The {self.kind}s were closed while they were working.")
                for call in done or self._late(calls):
                    worker = calls.pop(call)
                    number, worker.chunk = worker.chunk, None
                    assert number is not None
                    try:
                        if not done:
                            raise RayActorError(error_msg=f"timed out after {self.deadline_key}")
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
            # after an error, cancel all running work; mark workers idle, with no deadline
            for call, worker in calls.items():
                ray.cancel(call)
                worker.chunk = None
        return results

    def _late(self, calls: dict[Any, Worker]) -> list[Any]:
        """Return the calls that have exceeded their deadline."""
        now = time.monotonic()
        late = []
        for call, worker in calls.items():
            allowed = self.work_seconds + (0.0 if worker.is_ready else self.start_seconds)
            if now - worker.since > allowed:
                late.append(call)
        return late

    def _replace(self, worker: Worker, deaths: int, error: Exception) -> None:
        """Replace a dead or late actor."""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        if deaths > self.max_restarts:
            raise EngineError(
                f"{deaths} processes in a row died on the same work of {worker.name} ({reason}): "
                "see Ray's logs for the reason, or raise cluster.max_restarts; the same command "
                "continues the run."
            ) from error
        self.last_death = f"{worker.name} was replaced: {reason}."
        self.died = time.monotonic()
        logger.warning(self.last_death)
        ray.kill(worker.actor)
        self._on_replace(worker.actor)
        worker.restarts += 1
        worker.is_ready = False
        worker.actor = self._started(worker.number)

    def _started(self, number: int) -> Any:
        actor = self._start(number)
        actor.prepare.remote()  # not awaited: its errors are raised again by the first work
        return actor


def _result(call: Any) -> Any:
    """Return the result of a call; the package's own errors are raised without Ray's wrapper."""
    try:
        return ray.get(call)
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, TrustbatchError | OSError) else error) from error
