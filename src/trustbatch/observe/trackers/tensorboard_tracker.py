"""TensorBoard: a file of events in the run folder, with metrics as scalars and texts.

Records are written here and not by TensorBoard's own writer, whose thread prints its errors where
they happen.
"""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.record_writer import RecordWriter

from trustbatch.observe.status import RunState
from trustbatch.observe.trackers.base import COLUMNS, Memory, Row, TrackedRun
from trustbatch.utils.files import AppendedFile

# their classes are made when they are imported, where no type checker sees them
_events: Any = event_pb2
_summaries: Any = summary_pb2
_tensors: Any = tensor_pb2
_types: Any = types_pb2

FOLDER = "tensorboard"
VERSION = "brain.Event:2"
"""of the format, in the first event of a file"""


class TensorBoard:
    """Each start writes a file, which replaces what earlier ones say of later steps."""

    packages: ClassVar[tuple[str, ...]] = ()
    takes_id: ClassVar[bool] = False

    def start(self, run: TrackedRun, memory: Memory) -> None:
        """Open a file; TensorBoard leaves out what others hold of its first step and later."""
        folder = run.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not any(folder.glob("events.out.tfevents.*"))
        memory.last_step = -1 if is_new or not run.step else run.step
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest}"
        self._step = memory.last_step + 1
        self._file = AppendedFile(folder / name)
        self._records = RecordWriter(self._file)
        self._write(self._step, file_version=VERSION)
        start = _events.SessionLog(status=_events.SessionLog.START)
        self._write(self._step, session_log=start)
        self._write_texts(self._step, "config", [run.toml])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step as scalars."""
        kind = _summaries.Summary
        values = [kind.Value(tag=name, simple_value=each) for name, each in metrics.items()]
        self._write(step, summary=kind(value=values))
        self._step = step

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Write a text for each completion."""
        texts = [
            "\n".join(f"{name}: {each}" for name, each in zip(COLUMNS, row, strict=True))
            for row in rows
        ]
        self._write_texts(step, "completions", texts)

    def finish(self, state: RunState, evaluation: Mapping[str, float]) -> None:
        """Write the last evaluation as a text, and close the file."""
        if evaluation:
            self._write_texts(self._step, "evaluation", [json.dumps(evaluation, indent=2)])
        self._file.close()

    def _write_texts(self, step: int, tag: str, texts: Sequence[str]) -> None:
        """Write texts, indented: TensorBoard shows Markdown, and a model's text is none."""
        lines = ["\n".join(f"    {line}" for line in text.splitlines()) for text in texts]
        tensor = _tensors.TensorProto(
            dtype=_types.DT_STRING,
            string_val=[text.encode() for text in lines],
            tensor_shape={"dim": [{"size": len(lines)}]},
        )
        metadata = text_plugin.create_summary_metadata(tag, "")
        value = _summaries.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._write(step, summary=_summaries.Summary(value=[value]))

    def _write(self, step: int, **content: Any) -> None:
        event = _events.Event(wall_time=time.time(), step=step, **content)
        self._records.write(event.SerializeToString())
