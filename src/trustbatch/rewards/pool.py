"""A pool of grading processes that can be killed.

Each process grades one item at a time, so one that hangs delays no other: it is killed at its time
limit, its item gets a status, and a new process replaces it.
"""

import contextlib
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trustbatch.errors import RewardError
from trustbatch.rewards.environment import grader_environment
from trustbatch.rewards.worker import LENGTH, Outcome, WorkerSetup, encode_message
from trustbatch.types import GradeStatus
from trustbatch.utils.oom_kills import count_oom_kills

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""seconds in which a process has to load the grader"""
PROGRESS_INTERVAL = 10.0
"""seconds between two log lines"""
END_SECONDS = 5.0
"""in which a process that is told to end has killed all that its grader has started"""
MAX_FAILED_STARTS = 3
"""in a row"""


class NotPortable(Exception):
    """The grader can't be pickled, or loaded in another process."""


class GraderPool:
    """Grades items in separate processes.

    Processes start at the first use and end with `close`, or with the thread that started them.
    They have the usual environment variables, and those that `environment` names.
    """

    def __init__(
        self,
        grade: Callable[[Any], Any],
        *,
        workers: int,
        time_limit: float,
        memory_limit_gib: float,
        limit_name: str = "reward.time_limit",
        environment: Sequence[str] = (),
    ) -> None:
        self.workers = workers
        self.time_limit = time_limit
        self.limit_name = limit_name
        try:
            pickled = pickle.dumps(grade, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling a user's object may raise anything
            raise NotPortable(str(error)) from error
        self._setup = WorkerSetup(
            grade=pickled,
            path=[*sys.path, os.getcwd()],
            memory_limit=int(memory_limit_gib * 2**30),
        )
        self._environment = grader_environment(environment)
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._was_ready = False

    def prepare(self) -> None:
        """Wait until one process has loaded the grader; raises the errors of `run`."""
        while not any(process.is_ready for process in self._processes):
            self._start_workers(1)
            self._wait()

    def run(self, items: Sequence[Any]) -> list[Outcome]:
        """Return an outcome for each item; raises NotPortable if no process can load the grader."""
        for process in [each for each in self._processes if each.has_ended]:
            self._end(process)  # it was idle, so no item is lost
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
                logger.warning("Graded %d of %d completions.", len(items) - missing, len(items))
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.terminate()  # all at the same time
        for process in list(self._processes):
            self._end(process)

    def _start_workers(self, count: int) -> None:
        """Start processes until there are at least `count`."""
        while len(self._processes) < count:
            process = _Process(self._setup, self._environment)
            self._selector.register(process.outcomes, selectors.EVENT_READ, process)
            self._processes.append(process)

    def _end(self, process: "_Process") -> int:
        self._selector.unregister(process.outcomes)
        self._processes.remove(process)
        return process.end()

    def _wait(self) -> list[tuple[int, Outcome]]:
        """Wait for the next outcome, exit or deadline, and return the new outcomes."""
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

    def _receive(self, process: "_Process") -> list[tuple[int, Outcome]]:
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
        """Refuse a grader that never loaded; allow a few failures of one that did before."""
        if not self._was_ready:
            raise NotPortable(reason)
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RewardError(
                f"{self._failed_starts} grading processes in a row could not load the grader "
                f"({reason}), which others had loaded before: undo the change to its files."
            )

    def _remove(self, process: "_Process") -> list[tuple[int, Outcome]]:
        item, was_ready = process.item, process.is_ready
        how = _how_it_ended(self._end(process), process.oom_kills)
        if item is not None:
            reason = f"its process {how} while it graded"
            return [(item, Outcome(GradeStatus.FAILED, reason=reason))]
        if not was_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RewardError(
                    f"{self._failed_starts} grading processes in a row {how} before they "
                    "had loaded the grader: try to import it with python -c."
                )
        return []

    def _expire(self, process: "_Process") -> list[tuple[int, Outcome]]:
        item = process.item
        self._end(process)
        if item is None:
            raise RewardError(
                f"A grading process did not load the grader within {START_TIMEOUT:.0f} seconds: "
                "make what it imports faster."
            )
        reason = f"it took longer than {self.time_limit:g} seconds ({self.limit_name})"
        return [(item, Outcome(GradeStatus.TIMED_OUT, reason=reason))]


def _how_it_ended(code: int, oom_kills_before: int | None) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    if -code != signal.SIGKILL:
        return how
    oom_kills = count_oom_kills()
    if oom_kills is not None and oom_kills_before is not None and oom_kills > oom_kills_before:
        return f"{how} when the machine's memory ran out"
    return f"{how} (by the kernel if memory ran out, by a job scheduler or by hand)"


class _Process:
    """One worker process and its current item."""

    def __init__(self, setup: WorkerSetup, environment: Mapping[str, str]) -> None:
        self.oom_kills = count_oom_kills()
        """of the system when the process was started"""
        # a new session: its children are killed with it, and Ctrl-C does not reach it
        self._process = subprocess.Popen(
            # -P: a file of the current folder must not shadow a standard module
            [sys.executable, "-P", "-m", "trustbatch.rewards.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._items = self._process.stdin
        self.outcomes = self._process.stdout.fileno()
        self._received = bytearray()
        self.is_ready = False
        self.item: int | None = None
        self.deadline = time.monotonic() + START_TIMEOUT
        self._put(setup)

    def send(self, number: int, item: Any, time_limit: float) -> None:
        """Send an item, which has to be graded within `time_limit` seconds."""
        self.item = number
        self.deadline = time.monotonic() + time_limit
        self._put(item)

    def mark_ready(self) -> None:
        """Mark the grader as loaded."""
        self.is_ready = True
        self.mark_idle()

    def mark_idle(self) -> None:
        """Mark idle; no deadline."""
        self.item = None
        self.deadline = float("inf")

    @property
    def has_ended(self) -> bool:
        """Whether the process has exited."""
        return self._process.poll() is not None

    def receive(self) -> bool:
        """Read what the process has written; False if it has exited."""
        content = os.read(self.outcomes, 1 << 16)
        self._received += content
        return bool(content)

    def next_message(self) -> Outcome | None:
        """Return the next message once it has arrived completely."""
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = pickle.loads(self._received[LENGTH.size : end])
        del self._received[:end]
        return message

    def terminate(self) -> None:
        """Tell the supervisor to end the grader and itself."""
        self._process.send_signal(signal.SIGTERM if sys.platform == "linux" else signal.SIGKILL)

    def end(self) -> int:
        """Kill the process and all that it has started, and return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self._items.close()
        self.terminate()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # the supervisor itself is stuck, such as stopped
            self._process.kill()
            code = self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def _put(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the other pipe reports the exit
            self._items.write(encode_message(message))
            self._items.flush()
