"""Worker processes with a memory: the calls of one session go to one process.

A function that keeps what happened, such as a game, has a session per process. A session whose
call hangs, or whose process dies, is lost: its caller gets a status, and others go on.
"""

import threading
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from trustbatch.types import GradeStatus
from trustbatch.utils.worker import Outcome
from trustbatch.utils.worker_pool import WorkerPool
from trustbatch.utils.worker_process import WorkerProcess


class SessionPool(WorkerPool):
    """Gives each session a process of its own, until it ends; processes are used again.

    There are as many processes as there were sessions at a time; the caller limits those.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, workers=1, **options)
        self._live: dict[Hashable, WorkerProcess] = {}
        # an evaluation and a batch may be played by different threads
        self._lock = threading.RLock()

    @property
    def num_live(self) -> int:
        """Sessions that were opened, and neither ended nor lost."""
        return len(self._live)

    def open(self, items: Mapping[Any, Any]) -> dict[Any, Outcome]:
        """Start a session for each key, with its first item; returns the outcomes by key."""
        with self._lock:
            self._forget_ended()
            while new := [key for key in items if key not in self._live]:
                self._start_workers(len(self._live) + len(new))
                busy = set(map(id, self._live.values()))
                idle = [each for each in self._processes if each.is_ready and id(each) not in busy]
                self._live |= dict(zip(new, idle, strict=False))
                if len(idle) < len(new):
                    self._wait()  # until more processes are ready
            return self.call(items)

    def call(self, items: Mapping[Any, Any]) -> dict[Any, Outcome]:
        """Pass an item to each session, all at the same time; returns the outcomes by key."""
        with self._lock:
            keys, found = list(items), dict[Any, Outcome]()
            for number, key in enumerate(keys):
                if key in self._live:
                    self._live[key].send(number, items[key], self.time_limit)
                else:
                    reason = "its process ended between two calls"
                    found[key] = Outcome(GradeStatus.FAILED, reason=reason)
            while len(found) < len(keys):
                for number, outcome in self._wait():
                    found[keys[number]] = outcome
            return found

    def end(self, keys: Collection[Any], item: Any) -> None:
        """Pass a last item to the sessions that are still there; others may then use them."""
        with self._lock:
            live = [key for key in keys if key in self._live]
            self.call(dict.fromkeys(live, item))
            for key in live:
                self._live.pop(key, None)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            super().close()

    def _forget_ended(self) -> None:
        """Remove processes that have exited while nobody waited for them."""
        for process in [each for each in self._processes if each.has_ended]:
            self._end(process)

    def _end(self, process: WorkerProcess) -> int:
        self._live = {key: each for key, each in self._live.items() if each is not process}
        return super()._end(process)
