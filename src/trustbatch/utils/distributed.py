"""The processes that train together: those that torchrun started, or this one alone.

Every function but `this_rank` and `num_ranks` is collective: all ranks call it in the same order.
"""

import atexit
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.tensor import DTensor

from trustbatch.errors import ConfigError

DEADLINE = timedelta(hours=1)
"""how long a rank waits for the others: a generation or a checkpoint may lie in between"""


@contextmanager
def joined_ranks(device: str, *, store: Store | None = None) -> Iterator[None]:
    """Meet the other processes that torchrun started; a process on its own needs nothing.

    `store` is where they meet, if not where torchrun's processes do.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield
        return
    uses_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if uses_gpu:
        _take_gpu(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if uses_gpu else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=size,
        timeout=DEADLINE,
    )
    yield
    # they stay together for a second run, which could not meet at the same place again; not after
    # an error: others may be waiting in the middle of something, and torchrun ends them
    atexit.register(dist.destroy_process_group)


def _take_gpu(device: str) -> None:
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"model.device = {device!r} names one GPU for several processes: set it to cuda, and "
            "each process takes its own."
        )
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    if num_local > torch.cuda.device_count():
        raise ConfigError(
            f"This machine shows {torch.cuda.device_count()} GPUs and torchrun started {num_local} "
            "processes: lower --nproc-per-node, or set model.device to cpu."
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def rank_device(device: str) -> torch.device:
    """Return where this rank computes, from `model.device`."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def this_rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    if num_ranks() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def full_tensor(values: Tensor) -> Tensor:
    """Return the whole of a tensor of which each rank may hold a part."""
    return values.full_tensor() if isinstance(values, DTensor) else values


def all_gather(value: Any) -> list[Any]:
    """Return what each rank gave, in their order; tensors arrive in host memory."""
    if num_ranks() == 1:
        return [value]
    written = io.BytesIO()
    _HostPickler(written).dump(value)
    parts: list[Any] = [None] * num_ranks()
    dist.all_gather_object(parts, written.getvalue())
    return [pickle.loads(part) for part in parts]


def from_rank_zero(value: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Return what rank 0 gave; `group` has another deadline than usual."""
    box = [value]
    if num_ranks() > 1:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def patient_group(seconds: float) -> dist.ProcessGroup | None:
    """Return all ranks as a group that waits so much longer than `DEADLINE`; None for one rank."""
    if num_ranks() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=DEADLINE + timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def on_rank_zero(function: Callable[[], Any]) -> Any:
    """Return what a function gives on rank 0, the only one that calls it."""
    return from_rank_zero(function() if this_rank() == 0 else None)


class _HostPickler(pickle.Pickler):
    """Writes tensors as if they were in host memory: another rank has another GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
