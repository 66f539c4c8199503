"""A pool of worker processes that can be killed.

Each process does one item at a time, so one that hangs delays no other: it is killed at its time
limit, its item gets a status, and a new process replaces it.
"""

import logging
import os
import pickle
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trustbatch.errors import RewardError, TrustbatchError
from trustbatch.types import GradeStatus
from trustbatch.utils.worker import Outcome, WorkerSetup
from trustbatch.utils.worker_environment import worker_environment
from trustbatch.utils.worker_process import WorkerProcess, how_it_ended

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""seconds in which a process has to load its function, from when something waits for it"""
PROGRESS_INTERVAL = 10.0
"""seconds between two log lines"""
MAX_FAILED_STARTS = 3
"""in a row"""


@dataclass(frozen=True)
class Words:
    """How sentences speak of a pool's work, and the settings that they name."""

    function: str = "the grader"
    process: str = "grading process"
    processes: str = "grading processes"
    worked: str = "graded"
    items: str = "completions"
    limit: str = "reward.time_limit"
    variables: str = "reward.environment"
    error: type[TrustbatchError] = RewardError


class NotPortable(Exception):
    """The function can't be pickled, or loaded in another process."""


class WorkerPool:
    """Calls a function on items in separate processes.

    Processes start with `start` or at the first use, and end with `close`, or with the thread that
    started them.
    They have the usual environment variables, and those that `environment` names.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        workers: int,
        time_limit: float,
        memory_limit_gib: float,
        environment: Sequence[str] = (),
        words: Words = Words(),
    ) -> None:
        self.workers = workers
        self.time_limit = time_limit
        self.words = words
        try:
            pickled = pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling a user's object may raise anything
            raise NotPortable(str(error)) from error
        self._setup = WorkerSetup(
            function=pickled,
            path=[*sys.path, os.getcwd()],
            memory_limit=int(memory_limit_gib * 2**30),
        )
        self._environment = worker_environment(environment, key=words.variables)
        self._processes: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._was_ready = False

    def start(self, num_items: int) -> None:
        """Start the processes for that many items, and return while they load the function.

        Nothing is said of those that fail: `run` starts others, and raises their errors.
        """
        self._start_workers(min(self.workers, num_items))

    def prepare(self) -> None:
        """Wait until one process has loaded the function; raises the errors of `run`."""
        while not any(process.is_ready for process in self._processes):
            self._start_workers(1)
            self._wait()

    def run(self, items: Sequence[Any]) -> list[Outcome]:
        """Return an outcome for each item; raises NotPortable if no process loads the function."""
        for process in [each for each in self._processes if each.has_ended]:
            self._end(process)  # it had no item that could be lost
        waiting = deque(enumerate(items))
        outcomes: list[Outcome | None] = [None] * len(items)
        missing = len(items)
        logged = time.monotonic()
        while missing:
            self._start_workers(min(self.workers, missing))
            for process in self._processes:
                if process.is_ready and process.item is None and waiting:
                    number, item = waiting.popleft()
                    process.send(number, item, self.time_limit)
            for number, outcome in self._wait():
                outcomes[number] = outcome
                missing -= 1
            if time.monotonic() - logged > PROGRESS_INTERVAL:
                logged = time.monotonic()
                done = len(items) - missing
                worked = self.words.worked.capitalize()
                logger.warning("%s %d of %d %s.", worked, done, len(items), self.words.items)
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.terminate()  # all at the same time
        for process in list(self._processes):
            self._end(process)

    def _start_workers(self, count: int) -> None:
        """Start processes until there are at least `count`."""
        started: list[WorkerProcess] = []
        while len(self._processes) < count:
            process = WorkerProcess(self._environment)
            self._selector.register(process.outcomes, selectors.EVENT_READ, process)
            self._processes.append(process)
            started.append(process)
        # a large function waits for its reader, while all others come up
        for process in started:
            process.load(self._setup)

    def _end(self, process: WorkerProcess) -> int:
        self._selector.unregister(process.outcomes)
        self._processes.remove(process)
        return process.end()

    def _wait(self) -> list[tuple[int, Outcome]]:
        """Wait for the next outcome, exit or deadline, and return the new outcomes."""
        for process in self._processes:
            process.expect_ready(within=START_TIMEOUT)
        deadline = min(process.deadline for process in self._processes)
        wait = min(max(deadline - time.monotonic(), 0.0), PROGRESS_INTERVAL)
        found: list[tuple[int, Outcome]] = []
        for key, _ in self._selector.select(wait):
            found += self._receive(key.data)
        now = time.monotonic()
        for process in list(self._processes):
            if now >= process.deadline:
                found += self._expire(process)
        return found

    def _receive(self, process: WorkerProcess) -> list[tuple[int, Outcome]]:
        alive = process.receive()
        found: list[tuple[int, Outcome]] = []
        outcome = process.next_message()
        if outcome is not None and not process.is_ready:
            if outcome.status is not GradeStatus.GRADED:
                self._end(process)
                self._refuse_start(outcome.reason)
                return found
            process.mark_ready()
            self._was_ready = True
            self._failed_starts = 0
        elif outcome is not None and process.item is not None:
            found.append((process.item, outcome))
            process.mark_idle()
            if outcome.status is GradeStatus.OUT_OF_MEMORY:  # it may still hold memory
                self._end(process)
                return found
        if not alive:
            found += self._remove(process)
        return found

    def _refuse_start(self, reason: str) -> None:
        """Refuse a function that never loaded; allow a few failures of one that did."""
        if not self._was_ready:
            raise NotPortable(reason)
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise self.words.error(
                f"{self._failed_starts} {self.words.processes} in a row could not load "
                f"{self.words.function} ({reason}), which others had loaded before: undo the "
                "change to its files."
            )

    def _remove(self, process: WorkerProcess) -> list[tuple[int, Outcome]]:
        item, was_ready = process.item, process.is_ready
        how = how_it_ended(self._end(process), process.oom_kills)
        if item is not None:
            reason = f"its process {how} while it {self.words.worked}"
            return [(item, Outcome(GradeStatus.FAILED, reason=reason))]
        if not was_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise self.words.error(
                    f"{self._failed_starts} {self.words.processes} in a row {how} before they "
                    f"had loaded {self.words.function}: try to import it with python -c."
                )
        return []

    def _expire(self, process: WorkerProcess) -> list[tuple[int, Outcome]]:
        item = process.item
        self._end(process)
        if item is None:
            raise self.words.error(
                f"A {self.words.process} did not load {self.words.function} within "
                f"{START_TIMEOUT:.0f} seconds: make what it imports faster."
            )
        reason = f"it took longer than {self.time_limit:g} seconds ({self.words.limit})"
        return [(item, Outcome(GradeStatus.TIMED_OUT, reason=reason))]
