"""The run folder: configuration, environment, metrics, samples of completions, checkpoints."""

import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import torch

from trustbatch.errors import CheckpointError
from trustbatch.observe.config import RunConfig
from trustbatch.observe.status import NoStatusFile, StatusFile
from trustbatch.observe.trackers import Trackers
from trustbatch.observe.trackers.base import TrackedRun
from trustbatch.utils.files import AppendedFile, lock_folder, naming, write_atomically
from trustbatch.utils.terminal import LiveLine

METRICS_FILE = "metrics.jsonl"
ROLLOUT_FILES = "step-[0-9]*.jsonl*"
MEGABYTE = 1e6
MAX_RANGES = 5
"""of lines or steps that a sentence names"""


class RunFolder:
    """The files of a run, in `runs/NAME/`."""

    def __init__(self, table: RunConfig, resolved: str) -> None:
        self.table = table
        self.resolved = resolved
        """the whole configuration, as TOML"""
        self.path = table.path
        self.checkpoints = self.path / "checkpoints"
        self.status = StatusFile(self.path)

    @property
    def has_results(self) -> bool:
        """Whether a step was trained: what a failed start left behind binds nobody."""
        lines, _ = scan_metrics(self.path)
        has_steps = any(line["step"] > 0 for line in lines)
        return has_steps or any(self.checkpoints.glob("step-*"))

    def start(self, step: int) -> None:
        """Start or resume after `step`: delete what a killed run wrote beyond it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(
            self.path,
            in_use=f"Another process is training in {self.path}: wait for it, or choose another "
            "run.name.",
        )
        try:
            self._start_files(step)
        except OSError:
            self._lock.close()
            raise

    def _start_files(self, step: int) -> None:
        write_atomically(self.path / "config.toml", self.resolved)
        environment = json.dumps(describe_environment(), indent=2)
        write_atomically(self.path / "environment.json", environment + "\n")
        (self.path / "rollouts").mkdir(exist_ok=True)
        for path in (self.path / "rollouts").glob(ROLLOUT_FILES):
            if path.name.split(".")[0] > f"step-{step:06d}":
                path.unlink()
        kept = self._repair_metrics(step)
        write_atomically(self._metrics_file, "".join(json.dumps(line) + "\n" for line in kept))
        self._metrics = AppendedFile(self._metrics_file)
        tracked = TrackedRun(
            name=self.table.name,
            folder=self.path,
            toml=self.resolved,
            config=tomllib.loads(self.resolved),
            step=step,
        )
        self._trackers = Trackers(self.table.trackers, tracked, kept)

    def _repair_metrics(self, step: int) -> list[dict[str, Any]]:
        """Return the lines up to a step; says what is broken or missing, and keeps a copy of it.

        Metrics are a record only: the run goes on without those that are lost.
        """
        lines, broken = scan_metrics(self.path)
        # a run that restarts from the beginning also evaluates again before its first step
        by_step = {line["step"]: line for line in lines if step and line["step"] <= step}
        found = []
        if broken:
            found.append(f"can't be read in {_ranges(broken, 'line')}")
        repeated = len([line for line in lines if step and line["step"] <= step]) - len(by_step)
        if repeated:
            found.append(f"has {repeated} lines of steps that come again later")
        missing = [number for number in range(1, step + 1) if number not in by_step]
        if missing:
            found.append(f"has nothing of {_ranges(missing, 'step')}")
        if found:
            sentence = f"{self._metrics_file} {' and '.join(found)}"
            if broken or repeated:
                copy = self.path / "metrics-damaged.jsonl"
                shutil.copyfile(self._metrics_file, copy)
                sentence += f", so it is written anew and kept as {copy.name}"
            LiveLine().warn(f"{sentence}: the run goes on without these numbers.")
        return [by_step[number] for number in sorted(by_step)]

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl, and send the same numbers to the trackers."""
        self._metrics.write(json.dumps({"step": step, **metrics}).encode() + b"\n")
        self._trackers.log(step, metrics)

    def sync(self) -> None:
        """Wait until the metrics are on the disk: a checkpoint must not be ahead of them."""
        self._metrics.sync()

    def write_rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write completions of a step, one record each, and keep the size of all files bounded."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        file = self.path / "rollouts" / f"step-{step:06d}.jsonl.gz"
        with naming(file):
            # no time in the header: the same run writes the same bytes
            file.write_bytes(gzip.compress(lines.encode(), mtime=0))
        self._thin_rollouts()
        self._trackers.log_completions(step, records)

    def _thin_rollouts(self) -> None:
        """Delete every second file while all are too large; the first and the newest stay."""
        limit = self.table.rollouts_megabytes * MEGABYTE
        files = sorted((self.path / "rollouts").glob(ROLLOUT_FILES))
        while len(files) > 2 and sum(file.stat().st_size for file in files) > limit:
            for file in files[1:-1:2]:
                file.unlink()
            files = [file for file in files if file.exists()]

    def close(self) -> None:
        """Flush and close all files, and unlock the folder."""
        self.status.close()
        self._metrics.close()
        self._trackers.finish(self.status.state)
        self._lock.close()

    @property
    def _metrics_file(self) -> Path:
        return self.path / METRICS_FILE


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; an incomplete last line is left out."""
    lines, broken = scan_metrics(folder)
    if broken:
        raise CheckpointError(
            f"{folder / METRICS_FILE} can't be read in {_ranges(broken, 'line')}: remove what is "
            "broken, or resume the run, which does so and keeps a copy."
        )
    return lines


def scan_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the lines of metrics.jsonl, and the numbers of those that can't be read, from 1.

    An incomplete last line, which a kill leaves, is neither.
    """
    file = folder / METRICS_FILE
    if not file.is_file():
        return [], []
    lines, broken = [], []
    complete, _, _ = file.read_bytes().rpartition(b"\n")
    for number, text in enumerate(complete.split(b"\n") if complete else [], start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and type(line.get("step")) is int:
            lines.append(line)
        else:
            broken.append(number)
    return lines, broken


def _ranges(numbers: Sequence[int], what: str) -> str:
    """Return numbers in words, such as "steps 3 to 5, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    shown = [" to ".join(map(str, span)) for span in spans[:MAX_RANGES]]
    more = f" and {len(spans) - MAX_RANGES} more places" if len(spans) > MAX_RANGES else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(shown)}{more}"


class ReadOnlyRunFolder(RunFolder):
    """The run folder on ranks other than rank 0, which write nothing."""

    def __init__(self, table: RunConfig, resolved: str) -> None:
        super().__init__(table, resolved)
        self.status = NoStatusFile(self.path)

    def start(self, step: int) -> None:
        """Rank 0 does it."""

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank 0 does it."""

    def sync(self) -> None:
        """Rank 0 does it."""

    def write_rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Rank 0 does it."""

    def close(self) -> None:
        """Nothing is open."""


def describe_environment() -> dict[str, Any]:
    """Return versions, commit and hardware."""
    packages = ("trustbatch", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in packages},
        "commit": _commit(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
        "command": sys.argv[1:],
    }


def _commit() -> str | None:
    """Return the commit of the source tree that this package runs from, if it is a repository."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
