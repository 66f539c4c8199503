"""status.json: how a run is doing at this moment, for whoever asks from another terminal."""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from trustbatch.training.lag_metrics import (
    COMPLETIONS_BY_LAG,
    ONE_MINUS_ESS_BY_LAG,
    values_by_lag,
)
from trustbatch.utils.files import write_atomically

FILE_NAME = "status.json"
LONGEST_ERROR = 2000
ENGINE_METRICS = "cluster/engine/"

WorkerState = Literal["busy", "idle", "starting", "dead"]
RunState = Literal["running", "finished", "stopped", "failed"]


@dataclass(kw_only=True)
class WorkerStatus:
    """A process that works for the run, such as one that grades."""

    state: WorkerState = "starting"
    busy_share: float = 0.0
    """part of the last seconds or steps in which it had something to do"""
    restarts: int = 0


@dataclass(kw_only=True)
class EngineStatus(WorkerStatus):
    """A rollout engine."""

    tokens_per_second: float = 0.0
    """sampled in the last seconds or steps, idle time included"""
    version: int = 0
    """of the weights that it samples from"""


@dataclass(kw_only=True)
class RunStatus:
    """How far a run is and what its parts are doing; plain values, as in JSON."""

    step: int
    """steps trained so far"""
    steps: int
    version: int
    """of the policy that is being trained"""
    buffered_batches: int = 0
    """graded batches that wait to be trained on"""
    buffer_room: int = 0
    """how many may wait"""
    waiting_for: str = ""
    """what the trainer or the producer waits for at present"""
    lag_counts: dict[int, int] = field(default_factory=dict)
    """completions trained on since this start of the run, by lag"""
    one_minus_ess_by_lag: dict[int, float] = field(default_factory=dict)
    """the last value seen for each lag"""
    engines: dict[str, EngineStatus] = field(default_factory=dict)
    reward_workers: dict[str, WorkerStatus] = field(default_factory=dict)
    trainer_busy_share: float = 0.0
    generation_busy_share: float = 0.0
    restarts: int = 0
    last_error: str = ""

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note that a step has been trained: how far the run is, and the lags of its batch."""
        self.step = self.version = step
        counts = values_by_lag(metrics, COMPLETIONS_BY_LAG)
        for lag, count in counts.items():
            self.lag_counts[lag] = self.lag_counts.get(lag, 0) + int(count)
        is_mixed = any(name.startswith("policy/") and name.endswith("/share") for name in metrics)
        if counts.keys() == {0} and "one_minus_ess" in metrics and not is_mixed:
            # the whole batch has one lag and one policy, so it was not measured apart
            self.one_minus_ess_by_lag[0] = metrics["one_minus_ess"]
        self.one_minus_ess_by_lag |= values_by_lag(metrics, ONE_MINUS_ESS_BY_LAG)

    def metrics(self) -> dict[str, float]:
        """Return what belongs beside the other metrics of a step, where engines are several."""
        metrics = {
            "cluster/buffered_batches": float(self.buffered_batches),
            "cluster/engine_restarts": float(sum(e.restarts for e in self.engines.values())),
            "cluster/reward_restarts": float(sum(w.restarts for w in self.reward_workers.values())),
            "time/trainer_busy_share": self.trainer_busy_share,
            "time/generation_busy_share": self.generation_busy_share,
        }
        for name, engine in self.engines.items():
            metrics[f"{ENGINE_METRICS}{name}/tokens_per_second"] = engine.tokens_per_second
            metrics[f"{ENGINE_METRICS}{name}/busy_share"] = engine.busy_share
        return metrics


@dataclass(kw_only=True)
class StatusRecord(RunStatus):
    """What the file holds: the status, and who wrote it when. Times are seconds since 1970."""

    state: RunState
    pid: int
    host: str
    time: float
    """when it was written: a run that lives writes about once a second"""
    started: float
    stepped: float
    """when the last step ended, or the run was started"""
    seconds_left: float | None
    """until the last step, at the pace since the start; unknown before the first step"""


class StatusFile:
    """Writes status.json from a thread of its own, whatever the run is busy with.

    So a file that has grown old means that the process is gone, or hangs as a whole. Used as a
    context, it writes at the end how the run ended.
    """

    def __init__(self, folder: Path, seconds: float = 1.0) -> None:
        self._file = folder / FILE_NAME
        self._seconds = seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._writer: threading.Thread | None = None
        self._record: StatusRecord | None = None
        self._first_step = 0

    def update(self, status: RunStatus) -> None:
        """Note how the run is doing; the file has it within `seconds`, the first time at once.

        The status may be changed afterwards: what it says now is copied.
        """
        values = asdict(status)
        values["last_error"] = status.last_error[:LONGEST_ERROR]
        now = time.time()
        with self._lock:
            before = self._record
            if before is None:
                self._first_step = status.step
            self._record = StatusRecord(
                **values,
                state="running",
                pid=os.getpid(),
                host=socket.gethostname(),
                time=now,
                started=before.started if before else now,
                stepped=before.stepped if before and before.step == status.step else now,
                seconds_left=None,
            )
            if self._writer is None:
                self._write()
                self._ended.clear()
                self._writer = threading.Thread(
                    target=self._keep_writing, name="status file", daemon=True
                )
                self._writer.start()

    def close(self, state: RunState = "stopped", error: str = "") -> None:
        """Write how the run ended; only the first call does, and none where no update came."""
        if self._writer is None:
            return
        self._ended.set()
        self._writer.join()
        self._writer = None
        assert self._record is not None, "the writer starts with the first update"
        self._record.state = state
        if error:
            self._record.last_error = error[:LONGEST_ERROR]
        self._write()

    def __enter__(self) -> "StatusFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close("finished")
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self.close("stopped")
        else:
            self.close("failed", str(error) or type(error).__name__)

    def _keep_writing(self) -> None:
        while not self._ended.wait(self._seconds):
            with self._lock:
                self._write()

    def _write(self) -> None:
        assert self._record is not None, "an update comes first"
        record = self._record
        record.time = time.time()
        num_steps = record.step - self._first_step
        if num_steps > 0:
            each = (record.stepped - record.started) / num_steps
            end = record.stepped + each * (record.steps - record.step)
            record.seconds_left = max(end - record.time, 0.0)
        # a full disk ends the run where its metrics can't be written, not here
        with suppress(OSError):
            write_atomically(self._file, json.dumps(asdict(record), indent=1) + "\n")


class NoStatusFile(StatusFile):
    """For ranks other than the first, which leave it to that one."""

    def update(self, status: RunStatus) -> None:
        """Leave it to the first rank."""
