"""TensorBoard's file of events: the metrics of a run as scalars.

Written by this thread. TensorBoard's own writer has a thread, whose errors are printed where they
happen and reach the run later or never.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from trustbatch.utils.files import AppendedFile

# their classes are made when they are imported, where no type checker sees them
_events: Any = event_pb2
_summaries: Any = summary_pb2

VERSION = "brain.Event:2"
"""of the format, in the first event of a file"""


class EventFile:
    """A new file in `folder`, which replaces what others there say of `first_step` and later."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest}"
        self._file = AppendedFile(folder / name)
        self._records = RecordWriter(self._file)
        self._write(step=first_step, file_version=VERSION)
        start = _events.SessionLog(status=_events.SessionLog.START)
        self._write(step=first_step, session_log=start)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        kind = _summaries.Summary
        values = [kind.Value(tag=name, simple_value=each) for name, each in metrics.items()]
        self._write(step=step, summary=kind(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **content: Any) -> None:
        event = _events.Event(wall_time=time.time(), **content)
        self._records.write(event.SerializeToString())
