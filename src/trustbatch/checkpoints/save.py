"""Writing checkpoints beside the training, so that what is called `step-N` is always complete.

Every rank copies its pieces to host memory and goes on; a thread brings them to the disk. The
ranks tell each other through small files in the shared folder, which they need anyway. A process
group would be one more thing to fail there: its calls must come in the same order on every rank,
and a dead rank shows as a timeout that names nobody.
"""

import contextlib
import copy
import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from trustbatch.checkpoints.load import (
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
from trustbatch.checkpoints.shards import Piece, copy_pieces, list_tensors, read_into, write_pieces
from trustbatch.errors import CheckpointError
from trustbatch.models.policy import Policy
from trustbatch.rollout.records import group_to_record
from trustbatch.training.trainer import Trainer
from trustbatch.types import RolloutGroup
from trustbatch.utils.distributed import from_rank_zero, num_ranks, this_rank
from trustbatch.utils.files import fsync
from trustbatch.utils.terminal import LiveLine

MAX_FILE_BYTES = 5_000_000_000
STALL_SECONDS = 600.0
"""how long rank 0 waits for another rank that writes nothing"""
SECONDS_BEFORE_LINE, SECONDS_BETWEEN_LINES = 5.0, 30.0


@dataclass(frozen=True)
class _Snapshot:
    """The state after a step, which the training can no longer change."""

    step: int
    pieces: list[Piece]
    pending: list[list[RolloutGroup]]
    spare: list[RolloutGroup]
    state: dict[str, Any]
    merged: dict[str, Tensor]
    """on rank 0, the weights into which adapters are merged; none where all weights are trained"""

    @property
    def name(self) -> str:
        return f"step-{self.step}"


class Checkpointer:
    """Saves a trainer's state to `folder/step-N` and keeps the newest `keep` of them.

    With several ranks each has one, made and used at the same places.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        *,
        keep: int,
        max_file_bytes: int = MAX_FILE_BYTES,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.folder = folder
        self.trainer = trainer
        self.keep = keep
        self.max_file_bytes = max_file_bytes
        self.stall_seconds = stall_seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._doing = ""
        self._buffers: dict[str, Tensor] = {}
        if this_rank() == 0:
            for leftover in folder.glob(".*-step-*"):  # of a process killed while it wrote
                shutil.rmtree(leftover)
        from_rank_zero(None)  # nobody writes before the leftovers are gone

    def save(self, loop: LoopState) -> None:
        """Copy the state, and write it while the training goes on; waits for the one before."""
        self.finish()
        trainer = self.trainer
        tensors = {WEIGHTS + name: each for name, each in weights_of(trainer.policy).items()}
        tensors |= {OPTIMIZER + name: each for name, each in optimizer_state_of(trainer).items()}
        snapshot = _Snapshot(
            step=loop.step,
            pieces=copy_pieces(tensors, self._buffers),
            pending=[list(groups) for groups in loop.pending],
            spare=list(loop.spare),
            merged=_merged_weights(trainer.policy),
            state={
                "step": loop.step,
                "num_prompts": loop.num_prompts,
                "task": copy.deepcopy(loop.task),
                "sampling_metrics": list(loop.sampling_metrics),
                "model": trainer.policy.name,
                "frozen_sum": frozen_sum(trainer.policy),
                "num_optimizer_steps": trainer.num_optimizer_steps,
                "num_consecutive_skips": trainer.num_consecutive_skips,
            },
        )
        self._doing = f"{snapshot.name}: writing"
        self._writing = self._pool.submit(self._write, snapshot)

    def raise_failure(self) -> None:
        """Raise what went wrong with the last save, if that is known by now; never waits."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last save is complete; raises what went wrong with it."""
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
        """Wait for what is being written; on the way out another error comes first, so only say."""
        try:
            self.finish()
        except CheckpointError as error:
            LiveLine().show(str(error), last=True)
        self._pool.shutdown()

    def _write(self, snapshot: _Snapshot) -> None:
        partial = self.folder / f".writing-{snapshot.name}"
        try:
            self._write_part(snapshot, partial)
            if this_rank() == 0:
                files = self._wait_for_ranks(snapshot, partial)
                self._complete(snapshot, partial, files)
            self._doing = f"{snapshot.name}: done"
        except (OSError, SafetensorError) as error:
            failure = self._failure(snapshot, error)
            if num_ranks() == 1:
                shutil.rmtree(partial, ignore_errors=True)  # a full disk is worth emptying
            else:
                with contextlib.suppress(OSError):  # there may be no room for this either
                    _tell_rank_zero(partial, {"error": str(failure)})
            raise failure from error

    def _write_part(self, snapshot: _Snapshot, partial: Path) -> None:
        """Write what this rank holds, and say so to rank 0."""
        folder = partial / TRAINER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, Any] = {}
        for path in write_pieces(snapshot.pieces, folder, max_bytes=self.max_file_bytes):
            self._doing = f"{snapshot.name}: {path.name} written"
            files[str(path.relative_to(partial))] = seal(path)
        _tell_rank_zero(partial, {"files": files})

    def _wait_for_ranks(self, snapshot: _Snapshot, partial: Path) -> dict[str, Any]:
        """Return the files of all ranks, once all have written theirs."""
        files: dict[str, Any] = {}
        missing = set(range(num_ranks()))
        last_change, before = time.monotonic(), -1
        while missing:
            for rank in sorted(missing):
                note = _note_of(partial, rank)
                if note.is_file():
                    told = json.loads(note.read_text(encoding="utf-8"))
                    if "error" in told:
                        raise CheckpointError(f"Rank {rank}: {told['error']}")
                    files |= told["files"]
                    note.unlink()
                    missing.remove(rank)
            names = ", ".join(str(rank) for rank in sorted(missing))
            self._doing = f"{snapshot.name}: rank {names} still writes"
            written = _bytes_in(partial) + len(files)
            if written != before:
                last_change, before = time.monotonic(), written
            elif time.monotonic() - last_change > self.stall_seconds:
                raise CheckpointError(
                    f"{self.folder / snapshot.name} was not completed: rank {names} wrote nothing "
                    f"for {self.stall_seconds:.0f} seconds; see what it says, and check that all "
                    "ranks share run.folder."
                )
            if missing:
                time.sleep(0.05)
        return files

    def _complete(self, snapshot: _Snapshot, partial: Path, files: dict[str, Any]) -> None:
        """Add what is written once, and make it a checkpoint."""
        self._doing = f"{snapshot.name}: exporting the model"
        folder = partial / TRAINER_FOLDER
        trained = _whole_weights(folder)
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
            self._delete(final)  # a damaged one that was skipped at the start
        partial.rename(final)
        fsync(self.folder)
        self._delete_old(snapshot.step)

    def _delete_old(self, step: int) -> None:
        """Keep the newest ones; what is beyond this step was damaged, and skipped at the start."""
        checkpoints = list_checkpoints(self.folder)
        kept = [path for path in checkpoints if step_of(path) <= step][-self.keep :]
        for path in checkpoints:
            if path not in kept:
                self._delete(path)

    def _delete(self, checkpoint: Path) -> None:
        # under another name first: what is called step-N is complete at any moment
        shutil.rmtree(checkpoint.rename(self.folder / f".deleting-{checkpoint.name}"))

    def _failure(self, snapshot: _Snapshot, error: Exception) -> CheckpointError:
        complete = list_checkpoints(self.folder)
        last = f"the last complete one is {complete[-1].name}" if complete else "there is no other"
        return CheckpointError(
            f"{self.folder / snapshot.name} could not be written ({error}): make room there or "
            f"choose another run.folder, and start again; {last}."
        )


def _merged_weights(policy: Policy) -> dict[str, Tensor]:
    """Copy merged weights to host memory on rank 0; the others help to gather them."""
    if policy.adapters is None:
        return {}
    keeps = this_rank() == 0
    return {name: each.cpu() for name, each in policy.adapters.merged_state().items() if keeps}


def _whole_weights(folder: Path) -> dict[str, Tensor]:
    """Put the pieces of all ranks together in host memory."""
    whole = {
        name: torch.empty(stored.shape, dtype=stored.dtype)
        for name, stored in list_tensors(folder).items()
        if name.startswith(WEIGHTS)
    }
    read_into(whole, folder)
    return {name.removeprefix(WEIGHTS): tensor for name, tensor in whole.items()}


def _tell_rank_zero(partial: Path, told: dict[str, Any]) -> None:
    note = _note_of(partial, this_rank())
    unfinished = note.with_suffix(".part")
    unfinished.write_text(json.dumps(told), encoding="utf-8")
    unfinished.replace(note)


def _note_of(partial: Path, rank: int) -> Path:
    return partial / f".rank-{rank}.json"


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # renamed while it was looked at
            continue
    return total
