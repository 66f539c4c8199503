"""Writing checkpoints in the background; a folder named `step-N` is always complete.

Every rank copies its shards to host memory and continues to train; a thread writes them to disk.
The ranks notify rank 0 through small files in the shared folder, which they need anyway. A process
group would be less robust: its calls must come in the same order on every rank, and a dead rank
shows as a timeout that does not name it.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trustbatch.checkpoints.load import (
    CONFIG_FILE,
    FINGERPRINTS_FILE,
    OPTIMIZER,
    PENDING_FILE,
    SPARE_FILE,
    STATE_FILE,
    TRAINER_FOLDER,
    WEIGHTS,
    frozen_sum,
    list_checkpoints,
    optimizer_state_of,
    step_of,
    weights_of,
)
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.manifest import seal, write_manifest
from trustbatch.checkpoints.shards import Shard, copy_shards, list_tensors, read_into, write_shards
from trustbatch.errors import CheckpointError, first_line
from trustbatch.models.policy import Policy
from trustbatch.rollout.records import group_to_record
from trustbatch.training.trainer import Trainer
from trustbatch.types import RolloutGroup
from trustbatch.utils.distributed import from_rank_zero, num_ranks, this_rank
from trustbatch.utils.files import fsync
from trustbatch.utils.system_errors import advice_on
from trustbatch.utils.terminal import LiveLine

MAX_FILE_BYTES = 5_000_000_000
STALL_SECONDS = 600.0
"""how long rank 0 waits for a rank that writes nothing"""
SECONDS_BEFORE_LINE, SECONDS_BETWEEN_LINES = 5.0, 30.0


@dataclass(frozen=True)
class _Snapshot:
    """A copy of the state after a step, independent of further training."""

    step: int
    shards: list[Shard]
    pending: list[list[RolloutGroup]]
    spare: list[RolloutGroup]
    state: dict[str, Any]
    merged: dict[str, Tensor]
    """on rank 0, the weights with merged adapters; empty without adapters"""

    @property
    def name(self) -> str:
        return f"step-{self.step}"


class Checkpointer:
    """Saves a trainer's state to `folder/step-N` and keeps the newest `keep` of them.

    Every rank has one; `save` and the constructor are collective.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        *,
        keep: int,
        config_toml: str = "",
        fingerprints: Mapping[str, Any] | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.folder = folder
        self.trainer = trainer
        self.keep = keep
        self.config_toml = config_toml
        self.fingerprints = fingerprints
        self.max_file_bytes = max_file_bytes
        self.stall_seconds = stall_seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._doing = ""
        self._buffers: dict[str, Tensor] = {}
        if this_rank() == 0:
            for leftover in folder.glob(".*-step-*"):  # of a killed process
                shutil.rmtree(leftover)
        from_rank_zero(None)  # no rank writes before the leftovers are deleted

    def save(self, loop: LoopState) -> None:
        """Copy the state and write it in the background; waits for the previous save first."""
        self.finish()
        trainer = self.trainer
        tensors = {WEIGHTS + name: each for name, each in weights_of(trainer.policy).items()}
        tensors |= {OPTIMIZER + name: each for name, each in optimizer_state_of(trainer).items()}
        snapshot = _Snapshot(
            step=loop.step,
            shards=copy_shards(tensors, self._buffers),
            pending=[list(batch.groups) for batch in loop.pending],
            spare=list(loop.cursor.spare),
            merged=_merged_weights(trainer.policy),
            state={
                "step": loop.step,
                "num_prompts": loop.cursor.num_prompts,
                "task": loop.cursor.task_state,
                "batch_metrics": [batch.metrics for batch in loop.pending],
                "model": trainer.policy.name,
                "frozen_sum": frozen_sum(trainer.policy),
                "num_optimizer_steps": trainer.num_optimizer_steps,
                "num_consecutive_skips": trainer.num_consecutive_skips,
            },
        )
        self._doing = f"{snapshot.name}: writing"
        self._writing = self._pool.submit(self._write, snapshot)

    def raise_failure(self) -> None:
        """Raise the error of the last save, if it has ended with one; never waits."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last save is complete; raises its error."""
        if self._writing is None:
            return
        start, line = time.monotonic(), LiveLine()
        period, shown = SECONDS_BEFORE_LINE, False
        while not wait([self._writing], timeout=period).done:
            if this_rank() == 0:
                seconds = time.monotonic() - start
                line.show(f"Waiting for checkpoint {self._doing} ({seconds:.0f} s)")
                shown = line.is_live
            period = 1.0 if line.is_live else SECONDS_BETWEEN_LINES
        if shown:
            line.show(f"Checkpoint {self._doing}", last=True)
        written, self._writing = self._writing, None
        written.result()

    def close(self) -> None:
        """Wait for the last save; its error is only shown, since another one may be propagating."""
        try:
            self.finish()
        except CheckpointError as error:
            LiveLine().warn(str(error))
        self._pool.shutdown()

    def _write(self, snapshot: _Snapshot) -> None:
        partial = self.folder / f".writing-{snapshot.name}"
        try:
            self._write_shards(snapshot, partial)
            if this_rank() == 0:
                files = self._wait_for_ranks(snapshot, partial)
                self._complete(snapshot, partial, files)
            self._doing = f"{snapshot.name}: done"
        except (OSError, SafetensorError) as error:
            failure = self._failure(snapshot, error)
            if num_ranks() == 1:
                shutil.rmtree(partial, ignore_errors=True)  # frees space on a full disk
            else:
                with contextlib.suppress(OSError):  # the disk may be full
                    _notify_rank_zero(partial, {"error": str(failure)})
            raise failure from error

    def _write_shards(self, snapshot: _Snapshot, partial: Path) -> None:
        """Write this rank's shards, and notify rank 0."""
        folder = partial / TRAINER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, Any] = {}
        for path in write_shards(snapshot.shards, folder, max_bytes=self.max_file_bytes):
            self._doing = f"{snapshot.name}: {path.name} written"
            files[str(path.relative_to(partial))] = seal(path)
        _notify_rank_zero(partial, {"files": files})

    def _wait_for_ranks(self, snapshot: _Snapshot, partial: Path) -> dict[str, Any]:
        """Wait until all ranks have written their shards; returns their files."""
        files: dict[str, Any] = {}
        missing = set(range(num_ranks()))
        last_change, before = time.monotonic(), -1
        while missing:
            for rank in sorted(missing):
                note = _note_of(partial, rank)
                if note.is_file():
                    notice = json.loads(note.read_text(encoding="utf-8"))
                    if "error" in notice:
                        raise CheckpointError(f"Rank {rank}: {notice['error']}")
                    files |= notice["files"]
                    note.unlink()
                    missing.remove(rank)
            names = ", ".join(str(rank) for rank in sorted(missing))
            self._doing = f"{snapshot.name}: rank {names} is still writing"
            written = _bytes_in(partial) + len(files)
            if written != before:
                last_change, before = time.monotonic(), written
            elif time.monotonic() - last_change > self.stall_seconds:
                raise CheckpointError(
                    f"{self.folder / snapshot.name} was not completed: rank {names} wrote nothing "
                    f"for {self.stall_seconds:.0f} seconds; read its output, and check that all "
                    "ranks share run.folder."
                )
            if missing:
                time.sleep(0.05)
        return files

    def _complete(self, snapshot: _Snapshot, partial: Path, files: dict[str, Any]) -> None:
        """Add the files that rank 0 writes alone, and rename the folder to its final name."""
        self._doing = f"{snapshot.name}: exporting the model"
        folder = partial / TRAINER_FOLDER
        trained = _full_weights(folder)
        self.trainer.policy.save(
            partial,
            weights=snapshot.merged or trained,
            adapters=trained if snapshot.merged else None,
            max_file_bytes=self.max_file_bytes,
        )
        with (folder / PENDING_FILE).open("w", encoding="utf-8") as file:
            for groups in snapshot.pending:
                file.write(json.dumps([group_to_record(group) for group in groups]) + "\n")
        with (folder / SPARE_FILE).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(group_to_record(group)) + "\n" for group in snapshot.spare)
        (folder / STATE_FILE).write_text(json.dumps(snapshot.state), encoding="utf-8")
        if self.config_toml:
            (partial / CONFIG_FILE).write_text(self.config_toml, encoding="utf-8")
        if self.fingerprints is not None:
            written = json.dumps(self.fingerprints, indent=1) + "\n"
            (partial / FINGERPRINTS_FILE).write_text(written, encoding="utf-8")
        for path in sorted(path for path in partial.rglob("*") if path.is_file()):
            name = str(path.relative_to(partial))
            if name not in files:
                files[name] = seal(path)
        write_manifest(partial, files)
        for path in [path for path in partial.rglob("*") if path.is_dir()]:
            fsync(path)
        fsync(partial)
        final = self.folder / snapshot.name
        if final.exists():
            self._delete(final)  # a damaged one that was skipped when the run resumed
        partial.rename(final)
        fsync(self.folder)
        self._delete_old(snapshot.step)

    def _delete_old(self, step: int) -> None:
        """Keep the newest `keep`; those beyond this step are damaged ones of an earlier start."""
        checkpoints = list_checkpoints(self.folder)
        kept = [path for path in checkpoints if step_of(path) <= step][-self.keep :]
        for path in checkpoints:
            if path not in kept:
                self._delete(path)

    def _delete(self, checkpoint: Path) -> None:
        # renamed first, so that a folder named step-N is complete at any moment
        shutil.rmtree(checkpoint.rename(self.folder / f".deleting-{checkpoint.name}"))

    def _failure(self, snapshot: _Snapshot, error: Exception) -> CheckpointError:
        complete = list_checkpoints(self.folder)
        last = f"the last complete one is {complete[-1].name}" if complete else "there is no other"
        advice = advice_on(error) or "free disk space or choose another run.folder"
        return CheckpointError(
            f"{self.folder / snapshot.name} could not be written ({first_line(error)}): {advice}, "
            f"and start again; {last}."
        )


def _merged_weights(policy: Policy) -> dict[str, Tensor]:
    """Copy merged weights to host memory on rank 0; the other ranks take part in the gathering."""
    if policy.adapters is None:
        return {}
    is_first = this_rank() == 0
    return {name: each.cpu() for name, each in policy.adapters.merged_state() if is_first}


def _full_weights(folder: Path) -> dict[str, Tensor]:
    """Read the full weights from the shards of all ranks, in host memory."""
    whole = {
        name: torch.empty(stored.shape, dtype=stored.dtype)
        for name, stored in list_tensors(folder).items()
        if name.startswith(WEIGHTS)
    }
    read_into(whole, folder)
    return {name.removeprefix(WEIGHTS): tensor for name, tensor in whole.items()}


def _notify_rank_zero(partial: Path, notice: dict[str, Any]) -> None:
    note = _note_of(partial, this_rank())
    unfinished = note.with_suffix(".part")
    unfinished.write_text(json.dumps(notice), encoding="utf-8")
    unfinished.replace(note)


def _note_of(partial: Path, rank: int) -> Path:
    return partial / f".rank-{rank}.json"


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # renamed during the scan
            continue
    return total
