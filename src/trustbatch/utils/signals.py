"""Stopping on Ctrl-C or SIGTERM: after the step in progress, and at once on a second signal."""

import os
import signal
import threading
from contextlib import ExitStack
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STDERR = 2
MESSAGE = "\nStopping after this step; press Ctrl-C again to end at once.\n"


class StopSignals:
    """While it is entered, the first signal asks a run to stop, and the second ends it at once.

    `is_asked` is the run's `is_asked_to_stop`, which it calls after each step. Before it was called
    for the first time there is no step to keep, so the first signal ends the process at once.
    """

    def __init__(self) -> None:
        self._is_running = False
        self.received: int | None = None
        """the first signal that was received"""
        self._stack = ExitStack()

    def is_asked(self) -> bool:
        """Whether a signal was received."""
        self._is_running = True
        return self.received is not None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # others can't set handlers
            for number in SIGNALS:
                self._stack.callback(signal.signal, number, signal.signal(number, self._handle))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        self.received = self.received or number
        if not is_first or not self._is_running:
            raise KeyboardInterrupt
        # not through sys.stderr, in whose middle of a write the signal may have come
        os.write(STDERR, MESSAGE.encode())
