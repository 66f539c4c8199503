"""A tracker in a thread of its own: whatever it does, the run neither ends nor waits for it."""

import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trustbatch.observe.status import RunState
from trustbatch.observe.trackers.base import Memory, Row, TrackedRun, Tracker
from trustbatch.utils.files import write_atomically
from trustbatch.utils.terminal import LiveLine, plain_line

FILE_NAME = "trackers.json"
MAX_CALLS = 1000
"""that may wait for a tracker before it is left out"""
LONGEST_ERROR = 300
_LOGIN = re.compile(r"//[^/@\s]+@")
"""of a URL in an error, which is printed without it"""
_MEMORIES = TypeAdapter(dict[str, Memory])


class MemoryFile:
    """trackers.json: what trackers must know again when the run is resumed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._lock = threading.Lock()
        self._known: dict[str, Memory] = {}
        if self._file.is_file():
            try:
                self._known = _MEMORIES.validate_json(self._file.read_bytes())
            except ValidationError:
                LiveLine().warn(f"{self._file} can't be read: trackers get a new run each.")

    def of(self, name: str) -> Memory:
        """Return what a tracker has stored."""
        return self._known.get(name, Memory())

    def store(self, name: str, memory: Memory) -> None:
        """Write it, where there is something to remember."""
        if not memory.id:
            return
        with self._lock:
            self._known[name] = memory
            write_atomically(self._file, _MEMORIES.dump_json(self._known, indent=1) + b"\n")


class BackgroundTracker:
    """Makes the calls of a tracker in their order, and stops at the first that fails."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        memories: MemoryFile,
        lines: Sequence[Mapping[str, Any]],
    ) -> None:
        """Start it; `lines` of metrics.jsonl that it lacks are sent first."""
        self.name = name
        self.failure = ""
        """why it is left out"""
        self._tracker = tracker
        self._memories = memories
        self._memory = memories.of(name)
        self._calls: Queue[Callable[[], None] | None] = Queue(MAX_CALLS)
        self._thread = threading.Thread(
            target=self._work, args=(run, lines), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Have the metrics of a step sent, if the tracker does not have that step already."""
        self._add(lambda: self._log(step, metrics))

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Have completions of a step sent; its metrics follow."""
        self._add(lambda: self._log_completions(step, rows))

    def finish(self, state: RunState, evaluation: Mapping[str, float]) -> None:
        """Have the run ended; `join` waits for it."""
        self._add(lambda: self._tracker.finish(state, evaluation))
        self._add(None)

    def join(self, deadline: float) -> None:
        """Wait until all is sent, or until a moment of `time.monotonic`."""
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive() and not self.failure:
            self.failure = "it has not taken everything in time"

    def _add(self, call: Callable[[], None] | None) -> None:
        if self.failure:
            return
        try:
            self._calls.put_nowait(call)
        except Full:
            self.failure = f"it is {MAX_CALLS:,} calls behind"

    def _work(self, run: TrackedRun, lines: Sequence[Mapping[str, Any]]) -> None:
        try:
            if self._tracker.takes_id and not self._memory.id:
                self._memory.id = uuid.uuid4().hex
                self._memories.store(self.name, self._memory)
            self._tracker.start(run, self._memory)
            self._memories.store(self.name, self._memory)
            for line in lines:
                self._log(line["step"], {key: line[key] for key in line if key != "step"})
            while not self.failure and (call := self._calls.get()) is not None:
                call()
        # other people's code, which may raise anything and exit: the run goes on without it
        except (Exception, SystemExit) as error:
            self.failure = _in_words(error)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._memory.last_step:
            return
        self._tracker.log(step, metrics)
        self._memory.last_step = step
        self._memories.store(self.name, self._memory)

    def _log_completions(self, step: int, rows: Sequence[Row]) -> None:
        if step > self._memory.last_step:
            self._tracker.log_completions(step, rows)


def _in_words(error: BaseException) -> str:
    """Return the first line of an error, without escape sequences and without a login in a URL."""
    line = str(error).strip().partition("\n")[0]
    words = plain_line(_LOGIN.sub("//", line))[:LONGEST_ERROR].rstrip(".")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
