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

from trustbatch.config import Config, load_config
from trustbatch.errors import CheckpointError, ConfigError
from trustbatch.observe.status import NoStatusFile, StatusFile
from trustbatch.rollout.records import readable_record
from trustbatch.types import RolloutGroup
from trustbatch.utils.files import lock_folder, write_atomically

MAY_CHANGE = (
    "run.",
    "rollout.max_sequences",
    "rollout.prompts_per_call",
    "rollout.canary_every",
    "rollout.vllm.start_seconds",
    "rollout.vllm.generate_seconds",
    "rollout.vllm.update_seconds",
    "rollout.vllm.transfer_folder",
    "cluster.engines",
    "cluster.trainers",
    "cluster.reward_workers",
    "cluster.address",
    "cluster.engine_gpus",
    "cluster.weight_transfer",
    "cluster.transfer_folder",
    "cluster.max_restarts",
    "cluster.start_seconds",
    "cluster.generate_seconds",
    "cluster.grade_seconds",
    "cluster.train_seconds",
    "cluster.transfer_seconds",
    "reward.workers",
    "reward.time_limit",
    "reward.memory_limit_gib",
    "training.gradient_checkpointing",
    "training.compile",
    "training.cpu_offload",
    "evaluation.",
)
"""keys that a continued run may change: they decide where and how fast, not what is computed"""
DIVISION_OF_WORK = ("training.micro_batch_tokens", "training.share_prompts")
"""likewise, unless the objective measures its trust in each micro-batch"""


class RunFolder:
    """Everything that a run leaves behind, in `runs/NAME/`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path = config.run.path
        self.checkpoints = self.path / "checkpoints"
        self.status = StatusFile(self.path)
        self._refuse_other_config()

    def start(self, step: int) -> None:
        """Begin or continue after `step`: forget what a killed run wrote beyond it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(
            self.path,
            in_use=f"Another process is training in {self.path}: wait for it, or choose another "
            "run.name.",
        )
        write_atomically(self.path / "config.toml", self.config.to_toml())
        environment = json.dumps(describe_environment(), indent=2)
        write_atomically(self.path / "environment.json", environment + "\n")
        (self.path / "rollouts").mkdir(exist_ok=True)
        for path in (self.path / "rollouts").glob("step-[0-9]*.jsonl"):
            if path.stem > f"step-{step:06d}":
                path.unlink()
        # a run that starts again from nothing also evaluates again before its first step
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

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup], advantages: Tensor) -> None:
        """Write the first completions of a batch: whole groups first, so they can be compared."""
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
        lines = [json.dumps(row) + "\n" for row in rows[: self.config.run.rollouts_logged]]
        (self.path / "rollouts" / f"step-{step:06d}.jsonl").write_text(
            "".join(lines), encoding="utf-8"
        )

    def close(self) -> None:
        """Flush and close all files, and let others use the folder."""
        self.status.close()
        self._metrics.close()
        self._tensorboard.close()
        self._lock.close()

    @property
    def _metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def _refuse_other_config(self) -> None:
        file = self.path / "config.toml"
        # what a failed start left behind binds nobody
        has_steps = any(line["step"] > 0 for line in read_metrics(self.path))
        has_results = has_steps or any(self.checkpoints.glob("step-*"))
        if not file.is_file() or not has_results:
            return
        # parsed, so that a key this version has added counts as its default
        try:
            before = _flatten(load_config(file).to_dict())
        except ConfigError as error:
            raise ConfigError(f"{file} can't be read, so the run can't go on: {error}") from error
        now = _flatten(self.config.to_dict())
        may_change = MAY_CHANGE
        if self.config.objective.options.get("ess_scope") != "micro_batch":
            may_change += DIVISION_OF_WORK
        changed = sorted(
            key
            for key in before.keys() | now.keys()
            if before.get(key) != now.get(key) and not key.startswith(may_change)
        )
        if changed:
            key = changed[0]
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ConfigError(
                f"{self.path} holds a run with another configuration ({key} was "
                f"{before.get(key, 'not set')}, now {now.get(key, 'not set')}{more}): choose "
                "another name or folder for this run, or delete that one."
            )


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; a last line cut short by a kill is left out."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    complete, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    try:
        return [json.loads(line) for line in complete.splitlines()]
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} has a line that is not JSON: remove the line.") from error


class ReadOnlyRunFolder(RunFolder):
    """The run folder as ranks other than the first see it: they write nothing."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.status = NoStatusFile(self.path)

    def start(self, step: int) -> None:
        """Leave it to the first rank."""

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Leave it to the first rank."""

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup], advantages: Tensor) -> None:
        """Leave it to the first rank."""

    def close(self) -> None:
        """There is nothing to close."""


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
    """Return the commit of the source tree this package runs from, where it is one."""
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


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
