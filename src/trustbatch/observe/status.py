"""status.json: the current state of a run, for `trustbatch status` in another terminal."""

import json
import math
import os
import re
import socket
import threading
import time
from collections import deque
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
LEDGER_METRIC = re.compile(r"ledger/(\w+)/one_minus_ess")
"""of a cause; those of positions and probabilities have a range in their names"""
REWARDS_KEPT = 40
"""steps whose mean rewards are shown as a trend"""
STEPS_AVERAGED = 10
"""steps over which `StepStatus` averages speeds and busy shares"""

WorkerState = Literal["busy", "idle", "starting", "dead"]
RunState = Literal["running", "finished", "stopped", "failed"]


@dataclass(kw_only=True)
class WorkerStatus:
    """A worker process of the run, such as one that grades completions."""

    state: WorkerState = "starting"
    busy_share: float = 0.0
    """fraction of the last seconds or steps in which it was busy"""
    restarts: int = 0


@dataclass(kw_only=True)
class EngineStatus(WorkerStatus):
    """A rollout engine."""

    tokens_per_second: float = 0.0
    """sampled in the last seconds or steps, idle time included"""
    version: int = 0
    """of the weights that it samples with"""


@dataclass(kw_only=True)
class RunStatus:
    """The progress of a run and the state of its workers; plain values, as in JSON."""

    step: int
    """steps trained so far"""
    steps: int
    version: int
    """of the policy that is being trained"""
    buffered_batches: int = 0
    """graded batches that wait to be trained on"""
    buffer_room: int = 0
    """how many batches may wait"""
    waiting_for: str = ""
    """what the trainer or the rollout producer is waiting for"""
    lag_counts: dict[int, int] = field(default_factory=dict)
    """completions trained on since the start of this process, by lag"""
    one_minus_ess_by_lag: dict[int, float] = field(default_factory=dict)
    """the latest value for each lag"""
    one_minus_ess_by_cause: dict[str, float] = field(default_factory=dict)
    """the latest of the ledger, which not every step has"""
    rewards: list[float] = field(default_factory=list)
    """mean rewards of the last steps since the start of this process, the newest last"""
    engines: dict[str, EngineStatus] = field(default_factory=dict)
    reward_workers: dict[str, WorkerStatus] = field(default_factory=dict)
    trainer_busy_share: float = 0.0
    generation_busy_share: float = 0.0
    restarts: int = 0
    last_error: str = ""

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a trained step: the progress of the run, and the lags of its batch."""
        self.step = self.version = step
        counts = values_by_lag(metrics, COMPLETIONS_BY_LAG)
        for lag, count in counts.items():
            self.lag_counts[lag] = self.lag_counts.get(lag, 0) + int(count)
        is_mixed = any(name.startswith("policy/") and name.endswith("/share") for name in metrics)
        if counts.keys() == {0} and "one_minus_ess" in metrics and not is_mixed:
            # the whole batch has one lag and one policy, so there is no metric per lag
            self.one_minus_ess_by_lag[0] = metrics["one_minus_ess"]
        self.one_minus_ess_by_lag |= values_by_lag(metrics, ONE_MINUS_ESS_BY_LAG)
        causes = {
            match[1]: value
            for name, value in metrics.items()
            if (match := LEDGER_METRIC.fullmatch(name))
        }
        self.one_minus_ess_by_cause = causes or self.one_minus_ess_by_cause
        reward = metrics.get("reward/mean", math.nan)  # absent where nothing was graded
        if math.isfinite(reward):
            self.rewards = [*self.rewards, reward][-REWARDS_KEPT:]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step with a cluster, in addition to the trainer's."""
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
    """The content of the file: the status, and when which process wrote it (Unix times)."""

    state: RunState
    pid: int
    host: str
    time: float
    """when it was written: a live run writes about once per second"""
    started: float
    stepped: float
    """when the last step ended, or the run started"""
    seconds_left: float | None
    """until the last step, at the speed since the start; None before the first step"""


class StatusFile:
    """Writes status.json from a thread of its own, independently of what the run is doing.

    So an old file means that the process is dead or hangs as a whole. As a context manager it
    writes at the end how the run ended.
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
        """Set the status; the file has it within `seconds`, the first time immediately.

        The status is copied, so it may be changed afterwards.
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

    @property
    def state(self) -> RunState:
        """How the run is, or has ended; one without a status has failed at its start."""
        return self._record.state if self._record else "failed"

    def close(self, state: RunState = "stopped", error: str = "") -> None:
        """Write how the run ended; later calls, and calls without any update, do nothing."""
        if self._writer is None:
            return
        self._ended.set()
        self._writer.join()
        self._writer = None
        assert self._record is not None, "the writer starts with the first update"
        self._record.state = state
        if error:
            self._record.last_error = error[:LONGEST_ERROR]
        self._write(is_last=True)

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

    def _write(self, *, is_last: bool = False) -> None:
        assert self._record is not None, "an update comes first"
        record = self._record
        record.time = time.time()
        num_steps = record.step - self._first_step
        if num_steps > 0:
            each = (record.stepped - record.started) / num_steps
            end = record.stepped + each * (record.steps - record.step)
            record.seconds_left = max(end - record.time, 0.0)
        try:
            write_atomically(self._file, _text(record))
        except OSError:
            # on a full disk, writing the metrics raises the error, not this thread
            if is_last:
                _overwrite(self._file, record)


def mark_failed(folder: Path, error: str) -> None:
    """Write that a run has failed, for one whose process can't do so in order."""
    file = folder / FILE_NAME
    record = json.loads(file.read_bytes())
    if record["state"] == "running":
        record |= {"state": "failed", "last_error": error[:LONGEST_ERROR], "time": time.time()}
        write_atomically(file, json.dumps(record, indent=1) + "\n")


def _text(record: StatusRecord) -> str:
    return json.dumps(asdict(record), indent=1) + "\n"


def _overwrite(file: Path, record: StatusRecord) -> None:
    """Write the end of a run in the space that the file has already: a full disk gives no other."""
    with suppress(OSError), file.open("r+b", buffering=0) as opened:
        room = os.fstat(opened.fileno()).st_blocks * 512
        if len(_text(record).encode()) > room:
            record.last_error = ""
        content = _text(record).encode()
        if len(content) <= room:
            opened.write(content)
            opened.truncate()


class NoStatusFile(StatusFile):
    """The status file on ranks other than rank 0, which write nothing."""

    def update(self, status: RunStatus) -> None:
        """Rank 0 does it."""


class StepStatus:
    """The status of a run that generates and trains in turns; all its engines count as one."""

    def __init__(
        self, file: StatusFile, *, step: int, steps: int, buffer_room: int, engine: str
    ) -> None:
        """Start after `step` of `steps`; `buffer_room` is the number of batches that may wait."""
        self._file = file
        self._engine = EngineStatus(state="idle", version=step)
        self._status = RunStatus(
            step=step,
            steps=steps,
            version=step,
            buffer_room=buffer_room,
            engines={engine: self._engine},
        )
        self._num_tokens = 0
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=STEPS_AVERAGED)
        file.update(self._status)

    def generating(self) -> None:
        """Completions are being generated and graded."""
        self._engine.state = "busy"
        self._file.update(self._status)

    def training(self, *, buffered_batches: int) -> None:
        """A batch is being trained on, and `buffered_batches` more are waiting."""
        self._engine.state = "idle"
        self._status.buffered_batches = buffered_batches
        self._file.update(self._status)

    def trained(self, step: int, metrics: Mapping[str, float], *, num_tokens: int) -> None:
        """A step is done; `num_tokens` were sampled since the start of this process."""
        status, engine = self._status, self._engine
        status.add_step(step, metrics)
        engine.version = step
        self._recent.append((num_tokens - self._num_tokens, metrics))
        self._num_tokens = num_tokens
        seconds = self._sum("time/step_seconds")
        status.trainer_busy_share = self._sum("time/train_seconds") / seconds
        status.generation_busy_share = self._sum("time/generate_seconds") / seconds
        engine.busy_share = status.generation_busy_share
        engine.tokens_per_second = sum(tokens for tokens, _ in self._recent) / seconds
        self._file.update(status)

    def _sum(self, name: str) -> float:
        return sum(metrics[name] for _, metrics in self._recent)
