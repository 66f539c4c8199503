"""Real training processes for the tests of checkpoints: a gloo group on the CPU, FSDP2, AdamW."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.support.forked import make_process
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from trustbatch.checkpoints.load import (
    newest_checkpoint,
    optimizer_state_of,
    restore,
    weights_of,
)
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.save import Checkpointer
from trustbatch.models.policy import Policy
from trustbatch.objectives import build_objective
from trustbatch.training.config import TrainingConfig
from trustbatch.training.optimizer import create_moments
from trustbatch.training.trainer import Trainer

START_SECONDS = 120


def start(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a function of this module in a process of its own."""
    process = make_process(function, *arguments, daemon=True)
    process.start()
    return process


def in_ranks(num_ranks: int, folder: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in `num_ranks` processes of one group; 0: in this process, without a group."""
    if num_ranks == 0:
        function(*arguments)
        return
    processes = start_ranks(num_ranks, folder, function, *arguments)
    for process in processes:
        process.join(START_SECONDS)
    assert [process.exitcode for process in processes] == [0] * num_ranks


def start_ranks(
    num_ranks: int, folder: Path, function: Callable[..., None], *arguments: Any
) -> list[Any]:
    """Start a function in `num_ranks` processes of one group."""
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    return [
        start(_rank, rank, num_ranks, meeting, function, arguments) for rank in range(num_ranks)
    ]


def _rank(
    rank: int, num_ranks: int, meeting: Path, function: Callable[..., None], arguments: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks
    )
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def make_trainer(
    model: Path, *, name: str = "tiny", frozen: str | None = None, device: str = "cpu"
) -> Trainer:
    """Build a trainer, sharded where there is a process group."""
    policy = Policy.load(str(model), device=device, precision="float32")
    policy.name = name
    for parameter_name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in parameter_name)
    if dist.is_initialized():
        for layer in policy.model.model.layers:
            fully_shard(layer)
        fully_shard(policy.model)
    return Trainer(policy, build_objective("p3o"), TrainingConfig(), policy_temperature=1.0, seed=0)


def take_step(trainer: Trainer, step: int) -> None:
    """Take one AdamW step on rows that depend on the step alone."""
    rows = torch.randint(2, 16, (4, 8), generator=torch.Generator().manual_seed(step))
    rows = rows.to(trainer.policy.device)
    logits = trainer.policy.model(input_ids=rows, use_cache=False).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
    for group in trainer.optimizer.param_groups:
        # torchao wants its own tensor changed
        group["lr"] = group["lr"].fill_(1e-3) if isinstance(group["lr"], Tensor) else 1e-3
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.num_optimizer_steps += 1


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of weights and optimizer state, put together from all ranks."""
    tensors = weights_of(trainer.policy) | optimizer_state_of(trainer)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def write_state(trainer: Trainer, path: Path) -> None:
    state = whole_state(trainer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(state, path)


def train_and_save(model: Path, folder: Path) -> None:
    """Take four steps and save after two; the states after two and four are written for tests."""
    trainer = make_trainer(model)
    checkpointer = Checkpointer(folder / "checkpoints", trainer, keep=2, max_file_bytes=300_000)
    for step in range(1, 5):
        take_step(trainer, step)
        if step == 2:
            checkpointer.save(LoopState(step=step))
        if step % 2 == 0:
            write_state(trainer, folder / f"state-{step}.safetensors")
    checkpointer.finish()


def load_and_go_on(model: Path, folder: Path, output: Path) -> None:
    """Load the checkpoint of `train_and_save` and take the last two steps again."""
    trainer = make_trainer(model)
    create_moments(trainer.optimizer)  # as a run does; `train_and_save` leaves it to AdamW
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    assert restore(checkpoint, trainer).step == 2
    assert trainer.num_optimizer_steps == 2
    write_state(trainer, output / "state-2.safetensors")
    for step in (3, 4):
        take_step(trainer, step)
    write_state(trainer, output / "state-4.safetensors")


def compare_moments(model: Path) -> None:
    """Compare the moments that a run creates with those that AdamW's first step creates."""
    own, of_torch = make_trainer(model), make_trainer(model)
    create_moments(own.optimizer)
    for _, parameter in of_torch.policy.trained_parameters():
        parameter.grad = torch.zeros_like(parameter)
    of_torch.optimizer.step()
    found, expected = optimizer_state_of(own), optimizer_state_of(of_torch)
    assert list(found) == list(expected)
    assert {name.partition("/")[0] for name in found} == {"step", "exp_avg", "exp_avg_sq"}
    for name, tensor in found.items():
        other = expected[name]
        assert type(tensor) is type(other), name
        if isinstance(tensor, DTensor) and isinstance(other, DTensor):
            assert (tensor.placements, tensor.shape) == (other.placements, other.shape), name
            tensor, other = tensor.to_local(), other.to_local()
        assert (tensor.dtype, tensor.device) == (other.dtype, other.device), name
        assert (tensor.stride(), tensor.requires_grad) == (other.stride(), False), name
        if name.startswith("step/"):
            other = other - 1  # it has taken one
        assert torch.equal(tensor, other), name
        assert not tensor.any(), name


def save_for_ever(model: Path, folder: Path) -> None:
    """Save after every step; all weights then equal the number of the step."""
    trainer = make_trainer(model)
    take_step(trainer, 1)
    checkpointer = Checkpointer(folder, trainer, keep=2)
    for step in range(1, 10_000):
        with torch.no_grad():
            for parameter in trainer.policy.model.parameters():
                parameter.fill_(step)
        checkpointer.save(LoopState(step=step))
        dist.barrier()  # training steps keep the ranks together too


def fail_on_rank_one(model: Path, folder: Path, how: str) -> None:
    """Save where rank 1 does not take part, or can't write; each rank writes down its error."""
    from trustbatch.errors import CheckpointError

    trainer = make_trainer(model)
    checkpointer = Checkpointer(folder, trainer, keep=2, stall_seconds=1.0)
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1 and how == "full":
        limit_file_size(20_000)
    if rank == 0 or how != "absent":
        try:
            checkpointer.save(LoopState(step=1))
            checkpointer.finish()
        except CheckpointError as error:
            (folder.parent / f"error-{rank}").write_text(str(error))


def limit_file_size(num_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def save_with_a_full_disk(model: Path, folder: Path) -> None:
    """Save once, then with no room for a whole file, then go on as a training loop would."""
    from trustbatch.errors import CheckpointError

    torch.set_num_threads(1)
    trainer = make_trainer(model)
    checkpointer = Checkpointer(folder, trainer, keep=2)
    checkpointer.save(LoopState(step=1))
    checkpointer.finish()
    limit_file_size(100_000)
    checkpointer.save(LoopState(step=2))
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            checkpointer.raise_failure()
            time.sleep(0.01)
    except CheckpointError as error:
        (folder.parent / "error").write_text(str(error))
    os._exit(0)
