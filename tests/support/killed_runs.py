"""Runs of the command line that are killed, with a record of what they were doing at that moment.

The record is a small file mapped into the memory of the run: the kernel keeps its last content when
the process is killed, so what it says is exact.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support import checkpoint_ranks, forked

from trustbatch.observe.run_folder import read_metrics

CONFIG = """
seed = 3
[model]
name = {model!r}
{task}
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_tokens = 5
lag = {lag}
temperature = 1.1
[objective]
name = {objective!r}
[training]
steps = {steps}
learning_rate = 1e-3
mini_batches = 2
[run]
name = "run"
checkpoint_every = {every}
keep_checkpoints = {keep}
"""
SUMS = """
[task]
name = "arithmetic"
level = 1
"""
LEARNING = f"""
[task]
name = "mixture"
[[task.parts]]
name = "{Path(__file__).parent / "own_task.py"}:Short"
curriculum = {{low = 0.3, high = 0.7}}
weight = 3
[[task.parts]]
name = "arithmetic"
[rollout]
dynamic_sampling = true
max_sampling_rounds = 3
"""

PHASES = ("start", "generation", "training", "metrics", "checkpoint")
"""what a run can be doing; a checkpoint is written beside the rest"""
_RECORD = np.dtype([("entered", "u8"), ("left", "u8"), ("seconds", "f8")])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A configuration whose runs are killed."""

    task: str = SUMS
    objective: str = "p3o"
    lag: int = 0
    every: int = 2
    keep: int = 2
    steps: int = 12

    def write(self, folder: Path, model: Path, *, keep: int | None = None) -> Path:
        """Write the configuration into a new folder."""
        text = CONFIG.format(
            model=str(model),
            task=self.task,
            objective=self.objective,
            lag=self.lag,
            every=self.every,
            keep=keep or self.keep,
            steps=self.steps,
        )
        if "[rollout]" in self.task:
            text = text.replace("[rollout]\nprompts", "prompts")
        folder.mkdir()
        (folder / "config.toml").write_text(text)
        return folder / "config.toml"


def finish(config: Path) -> None:
    """Run `trustbatch train` to its end."""
    with forked.command("train", config, folder=config.parent) as process:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors


def comparable(folder: Path) -> list[dict[str, Any]]:
    """All metrics but those that measure the clock."""
    lines = read_metrics(folder)
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


class WatchedRun:
    """`trustbatch train` in a process whose imports are done, since they take most of a start."""

    def __init__(self, config: Path) -> None:
        record = config.parent / "phases"
        record.write_bytes(bytes(_RECORD.itemsize * len(PHASES)))
        self._record = np.memmap(record, dtype=_RECORD, mode="r")
        self._process = checkpoint_ranks.start(_train, config, record)

    @property
    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def entered(self, phase: str) -> int:
        """How often the run has begun a phase."""
        return int(self._record["entered"][PHASES.index(phase)])

    def mean_seconds(self) -> dict[str, float]:
        """How long a phase takes, of those that have ended."""
        ended = np.maximum(self._record["left"], 1)
        return dict(zip(PHASES, (self._record["seconds"] / ended).tolist(), strict=True))

    def join(self, seconds: float) -> int | None:
        """Wait for the end of the run; returns its exit code."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> list[str]:
        """End the run with SIGKILL; returns the phases that it was in."""
        self._process.kill()
        self._process.join()
        inside = self._record["entered"] > self._record["left"]
        return [phase for phase, is_inside in zip(PHASES, inside, strict=True) if is_inside]


def _train(config: Path, record: Path) -> None:
    """Call the command line; runs in a process of its own."""
    import trustbatch.api
    from trustbatch.checkpoints.save import Checkpointer
    from trustbatch.cli import main
    from trustbatch.loops.generate import BatchGenerator
    from trustbatch.observe.run_folder import RunFolder
    from trustbatch.training.trainer import Trainer

    phases = np.memmap(record, dtype=_RECORD, mode="r+")
    for phase, owner, name in (
        ("start", trustbatch.api, "build_session"),
        ("generation", BatchGenerator, "generate"),
        ("training", Trainer, "train"),
        ("metrics", RunFolder, "write_metrics"),
        ("checkpoint", Checkpointer, "_write"),
    ):
        row = phases[PHASES.index(phase) : PHASES.index(phase) + 1]
        setattr(owner, name, _noted(getattr(owner, name), row))
    os.chdir(config.parent)
    os.environ["HF_HUB_OFFLINE"] = "1"
    log = os.open(config.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    sys.exit(main(["train", str(config)]))


def _noted(function: Callable[..., Any], row: Any) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        row["entered"] += 1
        try:
            return function(*arguments, **options)
        finally:
            row["seconds"] += time.perf_counter() - began
            row["left"] += 1

    return noted
