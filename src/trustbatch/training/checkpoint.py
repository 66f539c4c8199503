"""Checkpoints: a Hugging Face folder plus all that an exact continuation needs.

A checkpoint is written beside its final place and renamed, so what is called `step-N` is complete.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trustbatch.errors import CheckpointError
from trustbatch.rollout.records import group_from_record, group_to_record
from trustbatch.training.trainer import Trainer
from trustbatch.types import RolloutGroup

OPTIMISER_FILE, STATE_FILE, PENDING_FILE = (
    "optimiser.safetensors",
    "trainer_state.json",
    "pending_rollouts.jsonl",
)


@dataclass(frozen=True)
class Resumed:
    """Where a loop goes on."""

    step: int
    """steps already trained"""
    pending: list[list[RolloutGroup]]
    """batches that were drawn but not yet trained on, oldest first"""


def save_checkpoint(
    folder: Path,
    trainer: Trainer,
    *,
    step: int,
    pending: Sequence[Sequence[RolloutGroup]],
    keep: int,
) -> Path:
    """Write `folder/step-N` atomically, then delete all but the newest `keep` checkpoints."""
    final = folder / f"step-{step}"
    partial = folder / f".writing-step-{step}"
    for leftover in folder.glob(".*-step-*"):  # of a process killed while it wrote or deleted
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    trainer.policy.save(partial)
    save_file(_optimiser_tensors(trainer), partial / OPTIMISER_FILE)
    with (partial / PENDING_FILE).open("w", encoding="utf-8") as file:
        for groups in pending:
            file.write(json.dumps([group_to_record(group) for group in groups]) + "\n")
    state = {
        "step": step,
        "num_optimiser_steps": trainer.num_optimiser_steps,
        "num_consecutive_skips": trainer.num_consecutive_skips,
    }
    (partial / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    partial.rename(final)
    _flush(folder)
    for old in list_checkpoints(folder)[:-keep]:
        # under another name first: what is called step-N is complete at any moment
        shutil.rmtree(old.rename(folder / f".deleting-{old.name}"))
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def restore(checkpoint: Path, trainer: Trainer) -> Resumed:
    """Give a trainer, whose policy was loaded from the checkpoint, the rest of its state."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        step = int(state["step"])
        trainer.num_optimiser_steps = int(state["num_optimiser_steps"])
        trainer.num_consecutive_skips = int(state["num_consecutive_skips"])
        tensors = load_file(checkpoint / OPTIMISER_FILE, device=str(trainer.policy.device))
        lines = (checkpoint / PENDING_FILE).read_text(encoding="utf-8").splitlines()
        pending = [[group_from_record(record) for record in json.loads(line)] for line in lines]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise damaged(checkpoint, error) from error
    for name, parameter in trainer.policy.model.named_parameters():
        moments = {
            key: tensors[f"{key}/{name}"]
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{key}/{name}" in tensors
        }
        if moments:
            trainer.optimiser.state[parameter] = moments
    return Resumed(step=step, pending=pending)


def damaged(checkpoint: Path, cause: Exception) -> CheckpointError:
    """Return the error for a checkpoint that can't be read."""
    return CheckpointError(
        f"{checkpoint} is damaged ({cause}): delete it, and the run continues from the checkpoint "
        "before it, or from the start."
    )


def _optimiser_tensors(trainer: Trainer) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": tensor
        for name, parameter in trainer.policy.model.named_parameters()
        for key, tensor in trainer.optimiser.state.get(parameter, {}).items()
    }


def _flush(path: Path) -> None:
    # a rename must not reach the disk before what it names
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
