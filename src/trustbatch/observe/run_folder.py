"""The run folder: configuration, environment, metrics, samples of completions, checkpoints."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from trustbatch.errors import CheckpointError
from trustbatch.observe.config import RunConfig
from trustbatch.observe.status import NoStatusFile, StatusFile
from trustbatch.rollout.records import readable_record
from trustbatch.types import RolloutGroup
from trustbatch.utils.files import lock_folder, write_atomically


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
        has_steps = any(line["step"] > 0 for line in read_metrics(self.path))
        return has_steps or any(self.checkpoints.glob("step-*"))

    def start(self, step: int) -> None:
        """Start or resume after `step`: delete what a killed run wrote beyond it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(
            self.path,
            in_use=f"Another process is training in {self.path}: wait for it, or choose another "
            "run.name.",
        )
        write_atomically(self.path / "config.toml", self.resolved)
        environment = json.dumps(describe_environment(), indent=2)
        write_atomically(self.path / "environment.json", environment + "\n")
        (self.path / "rollouts").mkdir(exist_ok=True)
        for path in (self.path / "rollouts").glob("step-[0-9]*.jsonl"):
            if path.stem > f"step-{step:06d}":
                path.unlink()
        # a run that restarts from the beginning also evaluates again before its first step
        kept = [line for line in read_metrics(self.path) if step and line["step"] <= step]
        write_atomically(self._metrics_file, "".join(json.dumps(line) + "\n" for line in kept))
        self._metrics = self._metrics_file.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(
            self.path / "tensorboard", purge_step=step + 1 if step else 0
        )

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl and the same numbers to TensorBoard."""
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)

    def sync(self) -> None:
        """Wait until the metrics are on the disk: a checkpoint must not be ahead of them."""
        os.fsync(self._metrics.fileno())

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup], advantages: Tensor) -> None:
        """Write the first completions of a batch, group by group, so that they can be compared."""
        rows = [
            readable_record(
                group,
                sample,
                step=step,
                advantage=float(advantages[number, sample]),
            )
            for number, group in enumerate(groups)
            for sample in range(len(group.completions))
        ]
        lines = [json.dumps(row) + "\n" for row in rows[: self.table.rollouts_logged]]
        (self.path / "rollouts" / f"step-{step:06d}.jsonl").write_text(
            "".join(lines), encoding="utf-8"
        )

    def close(self) -> None:
        """Flush and close all files, and unlock the folder."""
        self.status.close()
        self._metrics.close()
        self._tensorboard.close()
        self._lock.close()

    @property
    def _metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; an incomplete last line is left out."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    complete, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} has a line that is not JSON: remove the line.") from error


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

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup], advantages: Tensor) -> None:
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
