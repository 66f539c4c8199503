"""Reading checkpoints: finding the newest intact one, and restoring its exact state.

    step-N/                  an ordinary Hugging Face folder: config, tokenizer, *.safetensors
    step-N/trainer/          rank-*.safetensors (shards of weights and optimizer), and JSON
    step-N/manifest.json     every file with its size and digest, written last

`save.py` writes them.
"""

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from trustbatch.checkpoints.loop_state import Cursor, LoopState
from trustbatch.checkpoints.manifest import listed_bytes, verify
from trustbatch.checkpoints.shards import StoredTensor, is_plain, list_tensors, read_into
from trustbatch.errors import CheckpointError
from trustbatch.models.policy import Policy
from trustbatch.models.quantization.layer import quantized_layers
from trustbatch.rollout.records import group_from_record
from trustbatch.training.trainer import Trainer
from trustbatch.types import RolloutBatch
from trustbatch.utils.distributed import all_gather, from_rank_zero, this_rank
from trustbatch.utils.terminal import LiveLine

CONFIG_FILE = "trainer/config.toml"
"""in a checkpoint: the configuration of its run"""
FINGERPRINTS_FILE = "trainer/fingerprints.json"
"""in a checkpoint: hashes of the files that its run has read"""
TRAINER_FOLDER, STATE_FILE, PENDING_FILE = "trainer", "state.json", "pending_rollouts.jsonl"
SPARE_FILE = "spare_rollouts.jsonl"
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
"""prefixes of stored tensors: weights/NAME and optimizer/KEY/NAME"""
SLOW_VERIFY_BYTES = 4 * 2**30
"""verifying a checkpoint larger than this takes long enough to show a line"""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name[5:])


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest intact checkpoint, or None if there is no checkpoint.

    Damaged ones are skipped with a message. Collective: rank 0 searches, so that all ranks resume
    from the same checkpoint.
    """
    chosen, problem = None, None
    if this_rank() == 0:
        try:
            chosen = _newest_intact(folder)
        except CheckpointError as error:
            problem = str(error)
    problem = from_rank_zero(problem)
    if problem is not None:
        raise CheckpointError(problem)
    name = from_rank_zero(chosen.name if chosen else None)
    return folder / name if name else None


def restore(checkpoint: Path, trainer: Trainer, *, with_optimizer: bool = True) -> LoopState:
    """Restore the weights, optimizer state and counters of a trainer, bit for bit.

    Each rank reads its own shards, for any number of ranks that wrote the checkpoint. Whoever takes
    no optimizer step can do without its state, which is twice the size of the weights.
    """
    folder = checkpoint / TRAINER_FOLDER
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        stored = list_tensors(folder)
        _refuse_other_model(checkpoint, str(state["model"]), stored, trainer)
        _refuse_other_base(checkpoint, float(state["frozen_sum"]), trainer.policy)
        if with_optimizer:
            # before the weights, since creating the optimizer's state takes a step
            _restore_optimizer(trainer, stored, folder)
        read_into(_with_prefix(WEIGHTS, weights_of(trainer.policy)), folder)
        trainer.num_optimizer_steps = int(state["num_optimizer_steps"])
        trainer.num_consecutive_skips = int(state["num_consecutive_skips"])
        lines = (folder / PENDING_FILE).read_text(encoding="utf-8").splitlines()
        pending = [[group_from_record(record) for record in json.loads(line)] for line in lines]
        lines = (folder / SPARE_FILE).read_text(encoding="utf-8").splitlines()
        return LoopState(
            step=int(state["step"]),
            cursor=Cursor(
                num_prompts=int(state["num_prompts"]),
                spare=tuple(group_from_record(json.loads(line)) for line in lines),
                task_state=dict(state["task"]),
            ),
            pending=deque(
                RolloutBatch(groups=groups, metrics=metrics)
                for groups, metrics in zip(pending, state["batch_metrics"], strict=True)
            ),
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise unreadable(checkpoint, error) from error


def unreadable(checkpoint: Path, cause: Exception) -> CheckpointError:
    """Return the error for a checkpoint whose files are intact but can't be used."""
    return CheckpointError(
        f"{checkpoint} can't be read ({cause}): delete it, and the run continues from the "
        "checkpoint before it, or from the start."
    )


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """Return the tensors that training changes, by name; tied tensors by their first name only."""
    if policy.adapters is not None:
        return {name: each.detach() for name, each in policy.trained_parameters()}
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in policy.model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach()
    return tensors


def frozen_sum(policy: Policy) -> float:
    """Return the sum of the frozen weights of a model with adapters; collective."""
    if policy.adapters is None:
        return 0.0
    model = policy.model
    frozen = [each for each in model.parameters() if not each.requires_grad]
    for layer in quantized_layers(model).values():
        frozen += [layer.quantized.codes, layer.quantized.scales]
    parts = [
        part.double().sum().item()
        for p in frozen
        # a part at a time: an embedding in float64 is larger than a layer's weights together
        for part in (p.to_local() if isinstance(p, DTensor) else p).detach().view(-1).split(2**24)
    ]
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    return math.fsum(all_gather(math.fsum(parts)) if is_sharded else parts)


def optimizer_state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the optimizer's tensors as KEY/NAME; frozen parameters have none."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.policy.model.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"{key} of the optimizer is not a tensor"
            tensors[f"{key}/{name}"] = value
    return tensors


def _newest_intact(folder: Path) -> Path | None:
    skipped: list[str] = []
    line = LiveLine()
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            num_bytes = listed_bytes(checkpoint)
            if num_bytes > SLOW_VERIFY_BYTES:
                line.show(f"Verifying {checkpoint} ({num_bytes / 1e9:.0f} GB)")
            verify(checkpoint)
        except (CheckpointError, OSError) as error:
            skipped.append(f"{checkpoint.name}: {error}")
            line.warn(f"Skipped {checkpoint}, which is damaged: {error}.")
        else:
            return checkpoint
    if skipped:
        raise CheckpointError(
            f"No checkpoint in {folder} can be used ({'; '.join(skipped)}): delete them to start "
            "from the beginning, or choose another run.name."
        )
    return None


def _refuse_other_model(
    checkpoint: Path, model: str, stored: Mapping[str, StoredTensor], trainer: Trainer
) -> None:
    difference = None
    if model != trainer.policy.name:
        difference = f"{model!r}, not {trainer.policy.name!r}"
    here = _with_prefix(WEIGHTS, weights_of(trainer.policy))
    for name in sorted({name for name in stored if name.startswith(WEIGHTS)} | here.keys()):
        there = list(stored[name].shape) if name in stored else "missing"
        wanted = list(here[name].shape) if name in here else "missing"
        if there != wanted and difference is None:
            difference = f"{name.removeprefix(WEIGHTS)} is {there} there, and {wanted} here"
    if difference is not None:
        raise CheckpointError(
            f"{checkpoint} belongs to another model ({difference}): choose another run.name, or "
            "the model.name that it was trained with."
        )


def _refuse_other_base(checkpoint: Path, expected: float, policy: Policy) -> None:
    # sums over another number of ranks differ by rounding
    if not math.isclose(frozen_sum(policy), expected, rel_tol=1e-9, abs_tol=1e-9):
        raise CheckpointError(
            f"{checkpoint} has adapters for other weights than those of {policy.name!r} now: "
            "restore the model that the run started with, or choose another run.name."
        )


def _restore_optimizer(trainer: Trainer, stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """Let the optimizer create the state that it lacks, then fill it.

    A parameter that never had a gradient may have none in the checkpoint: it stays as it is new.
    """
    keys = {name.removeprefix(OPTIMIZER) for name in stored if name.startswith(OPTIMIZER)}
    with_state = {_parameter_of(key) for key in keys}
    trainer.optimizer.zero_grad(set_to_none=True)
    parameters = dict(trainer.policy.model.named_parameters())
    for name, parameter in parameters.items():
        if name in with_state and not trainer.optimizer.state.get(parameter):
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    state = optimizer_state_of(trainer)
    targets = {key: each for key, each in state.items() if _parameter_of(key) in with_state}
    if targets.keys() != keys:
        raise ValueError("it holds the state of another optimizer")
    # quantized states are stored de-quantized, in the shape of the parameter
    quantized = {key: target for key, target in targets.items() if not is_plain(target)}
    numbers = {
        key: torch.empty_like(parameters[_parameter_of(key)], requires_grad=False)
        for key in quantized
    }
    read_into(_with_prefix(OPTIMIZER, targets | numbers), folder)
    for key, target in quantized.items():
        target.copy_(numbers[key])


def _parameter_of(key: str) -> str:
    """Return the name of the parameter that a tensor KEY/NAME of the optimizer belongs to."""
    return key.partition("/")[2]


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
