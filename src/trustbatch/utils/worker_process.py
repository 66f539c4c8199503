"""One worker process: started, given items, and killed with all that it has started."""

import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from trustbatch.utils.oom_kills import count_oom_kills
from trustbatch.utils.worker import LENGTH, Outcome, WorkerSetup, encode_message

END_SECONDS = 5.0
"""in which a process that is told to end has killed all that its function has started"""


class WorkerProcess:
    """One worker process and its current item."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.oom_kills = count_oom_kills()
        """of the system when the process was started"""
        # a new session: its children are killed with it, and Ctrl-C does not reach it
        self._process = subprocess.Popen(
            # -P: a file of the current folder must not shadow a standard module
            [sys.executable, "-P", "-m", "trustbatch.utils.worker", str(os.getpid())],
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
        self.deadline = math.inf

    def load(self, setup: WorkerSetup) -> None:
        """Send the function, which the process then loads; there is no deadline yet."""
        self._put(setup)

    def expect_ready(self, within: float) -> None:
        """Set the deadline of a process that is loading, unless it has one."""
        if not self.is_ready and self.deadline == math.inf:
            self.deadline = time.monotonic() + within

    def send(self, number: int, item: Any, time_limit: float) -> None:
        """Send an item, which has to be done within `time_limit` seconds."""
        self.item = number
        self.deadline = time.monotonic() + time_limit
        self._put(item)

    def mark_ready(self) -> None:
        """Mark the function as loaded."""
        self.is_ready = True
        self.mark_idle()

    def mark_idle(self) -> None:
        """Mark idle; no deadline."""
        self.item = None
        self.deadline = math.inf

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
        """Tell the supervisor to end the function and itself."""
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


def how_it_ended(code: int, oom_kills_before: int | None) -> str:
    """Return how a process ended, in words that follow "its process"."""
    if code >= 0:
        return f"ended with exit code {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    if -code != signal.SIGKILL:
        return how
    oom_kills = count_oom_kills()
    if oom_kills is not None and oom_kills_before is not None and oom_kills > oom_kills_before:
        return f"{how} when the machine's memory ran out"
    return f"{how} (by the kernel if memory ran out, by a job scheduler or by hand)"
