"""A pool of grading processes that can be killed.

Each process works on one item at a time, so one that hangs holds up nobody but itself: it is killed
at its time limit, its item gets a status, and another process takes its place.
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
from collections.abc import Callable, Sequence
from typing import Any

from trustbatch.errors import RewardError
from trustbatch.rewards.worker import LENGTH, Outcome, Start, frame
from trustbatch.types import GradeStatus

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""how long a process may take to load the grader"""
SAY_EVERY = 10.0
MAX_STARTS_IN_A_ROW = 3


class NotPortable(Exception):
    """The grader can't be sent to another process."""


class GraderPool:
    """Grades items in processes of its own.

    Processes start at the first use and end with `close`, or with the thread that started them.
    """

    def __init__(
        self,
        grade: Callable[[Any], Any],
        *,
        workers: int,
        time_limit: float,
        memory_limit_gib: float,
        limit_name: str = "reward.time_limit",
    ) -> None:
        self.workers = workers
        self.time_limit = time_limit
        self.limit_name = limit_name
        try:
            pickled = pickle.dumps(grade, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickle and the objects themselves raise what they like
            raise NotPortable(str(error)) from error
        self._start = Start(
            grade=pickled,
            path=[*sys.path, os.getcwd()],
            memory_limit=int(memory_limit_gib * 2**30),
            parent=os.getpid(),
        )
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._deaths_before_ready = 0
        self._was_ready = False

    def prepare(self) -> None:
        """Wait for one process that has loaded the grader; raises as `run` does."""
        while not any(process.is_ready for process in self._processes):
            self._start_workers(1)
            self._answers()

    def run(self, items: Sequence[Any]) -> list[Outcome]:
        """Return an outcome for each item; raises NotPortable if no process can load the grader."""
        for process in [each for each in self._processes if each.has_ended]:
            self._end(process)  # while it had nothing to do: no item is lost
        waiting = deque(enumerate(items))
        outcomes: list[Outcome | None] = [None] * len(items)
        missing = len(items)
        said = time.monotonic()
        while missing:
            self._start_workers(min(self.workers, missing))
            for process in self._processes:
                if process.is_ready and process.item is None and waiting:
                    number, item = waiting.popleft()
                    process.send(number, item, self.time_limit)
            for number, outcome in self._answers():
                outcomes[number] = outcome
                missing -= 1
            if time.monotonic() - said > SAY_EVERY:
                said = time.monotonic()
                logger.warning("Graded %d of %d completions.", len(items) - missing, len(items))
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End all processes."""
        for process in list(self._processes):
            self._end(process)

    def _start_workers(self, count: int) -> None:
        """Have so many processes, or more."""
        while len(self._processes) < count:
            process = _Process(self._start)
            self._selector.register(process.answers, selectors.EVENT_READ, process)
            self._processes.append(process)

    def _end(self, process: "_Process") -> int:
        self._selector.unregister(process.answers)
        self._processes.remove(process)
        return process.end()

    def _answers(self) -> list[tuple[int, Outcome]]:
        """Wait for the next answer, death or deadline, and return what is known by then."""
        deadline = min(process.deadline for process in self._processes)
        wait = min(max(deadline - time.monotonic(), 0.0), SAY_EVERY)
        found: list[tuple[int, Outcome]] = []
        for key, _ in self._selector.select(wait):
            found += self._hear(key.data)
        now = time.monotonic()
        for process in list(self._processes):
            if now >= process.deadline:
                found += self._expire(process)
        return found

    def _hear(self, process: "_Process") -> list[tuple[int, Outcome]]:
        alive = process.receive()
        found: list[tuple[int, Outcome]] = []
        outcome = process.next_message()
        if outcome is not None and not process.is_ready:
            if outcome.status is not GradeStatus.GRADED:
                self._end(process)
                self._refuse_start(outcome.reason)
                return found
            process.become_ready()
            self._was_ready = True
            self._deaths_before_ready = 0
        elif outcome is not None and process.item is not None:
            found.append((process.item, outcome))
            process.rest()
            if outcome.status is GradeStatus.OUT_OF_MEMORY:  # what it still holds is unknown
                self._end(process)
                return found
        if not alive:
            found += self._remove(process)
        return found

    def _refuse_start(self, reason: str) -> None:
        """The first failure says what the grader is; a later one that its file has changed."""
        if not self._was_ready:
            raise NotPortable(reason)
        self._deaths_before_ready += 1
        if self._deaths_before_ready >= MAX_STARTS_IN_A_ROW:
            raise RewardError(
                f"{self._deaths_before_ready} grading processes in a row could not load the grader "
                f"({reason}), which others had loaded before: undo what has changed since."
            )

    def _remove(self, process: "_Process") -> list[tuple[int, Outcome]]:
        item, was_ready = process.item, process.is_ready
        how = _how_it_ended(self._end(process))
        if item is not None:
            reason = f"its process {how} while it graded"
            return [(item, Outcome(GradeStatus.FAILED, reason=reason))]
        if not was_ready:
            self._deaths_before_ready += 1
            if self._deaths_before_ready >= MAX_STARTS_IN_A_ROW:
                raise RewardError(
                    f"{self._deaths_before_ready} grading processes in a row {how} before they "
                    "had loaded the grader: try to import it with python -c."
                )
        return []

    def _expire(self, process: "_Process") -> list[tuple[int, Outcome]]:
        item = process.item
        self._end(process)
        if item is None:
            raise RewardError(
                f"A grading process did not load the grader within {START_SECONDS:.0f} seconds: "
                "make what it imports faster."
            )
        reason = f"it took longer than {self.time_limit:g} seconds ({self.limit_name})"
        return [(item, Outcome(GradeStatus.TIMED_OUT, reason=reason))]


def _how_it_ended(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps for want of memory," if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"


class _Process:
    """One worker, and what it is busy with."""

    def __init__(self, start: Start) -> None:
        # a session of its own: what it starts is killed with it, and Ctrl-C is not its business
        self._process = subprocess.Popen(
            # -P: a file of the current folder must not stand for a module of Python's own
            [sys.executable, "-P", "-m", "trustbatch.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._items = self._process.stdin
        self.answers = self._process.stdout.fileno()
        self._received = bytearray()
        self.is_ready = False
        self.item: int | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self._put(start)

    def send(self, number: int, item: Any, time_limit: float) -> None:
        """Give it an item, and so much time."""
        self.item = number
        self.deadline = time.monotonic() + time_limit
        self._put(item)

    def become_ready(self) -> None:
        """It has loaded the grader."""
        self.is_ready = True
        self.rest()

    def rest(self) -> None:
        """It has nothing to do, and all the time for it."""
        self.item = None
        self.deadline = float("inf")

    @property
    def has_ended(self) -> bool:
        """Whether it is no more."""
        return self._process.poll() is not None

    def receive(self) -> bool:
        """Take in what it has written; False if it has ended."""
        content = os.read(self.answers, 1 << 16)
        self._received += content
        return bool(content)

    def next_message(self) -> Outcome | None:
        """Return its answer once that has arrived whole."""
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = pickle.loads(self._received[LENGTH.size : end])
        del self._received[:end]
        return message

    def end(self) -> int:
        """Kill it with all that it has started, and return its exit code."""
        self._process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._items.close()
        code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def _put(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is heard on the other pipe
            self._items.write(frame(message))
            self._items.flush()


def _environment() -> dict[str, str]:
    """Let it find this package, and not start a thread for each core."""
    path = os.pathsep.join(filter(None, sys.path))
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
