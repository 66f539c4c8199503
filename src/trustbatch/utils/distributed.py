"""The ranks: processes that train together, started by torchrun, or this process alone.

Every function except `this_rank`, `num_ranks` and `rank_device` is collective: all ranks call it in
the same order.
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
"""timeout of collective calls: the other ranks may be generating or writing a checkpoint"""


@contextmanager
def joined_ranks(device: str, *, store: Store | None = None) -> Iterator[None]:
    """Initialize the process group of the ranks that torchrun started; a single process has none.

    `store` is the rendezvous store (default: torchrun's own).
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield
        return
    uses_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if uses_gpu:
        _select_gpu(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if uses_gpu else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=size,
        timeout=DEADLINE,
    )
    yield
    # The group is kept for a second run, since a rendezvous can't be repeated. After an error it is
    # not destroyed: other ranks may be inside a collective call, and torchrun ends them.
    atexit.register(dist.destroy_process_group)


def _select_gpu(device: str) -> None:
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"model.device = {device!r} names one GPU for several processes: set it to cuda, and "
            "each process uses its own."
        )
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    if num_local > torch.cuda.device_count():
        raise ConfigError(
            f"This machine has {torch.cuda.device_count()} GPUs and torchrun started {num_local} "
            "processes: lower --nproc-per-node, or set model.device to cpu."
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def rank_device(device: str) -> torch.device:
    """Return the device of this rank for a value of `model.device`."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def this_rank() -> int:
    """Return the rank of this process, from 0; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the world size: how many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; the input is left unchanged."""
    if num_ranks() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def full_tensor(values: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded over the ranks."""
    return values.full_tensor() if isinstance(values, DTensor) else values


def all_gather(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, in rank order; tensors arrive in host memory."""
    if num_ranks() == 1:
        return [value]
    written = io.BytesIO()
    _HostPickler(written).dump(value)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, written.getvalue(), group=group)
    return [pickle.loads(part) for part in parts]


def from_rank_zero(value: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of rank 0 on all ranks; `group` may have a longer timeout than usual."""
    box = [value]
    if num_ranks() > 1:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def patient_group(seconds: float) -> dist.ProcessGroup | None:
    """Return a group of all ranks with the timeout `DEADLINE` + `seconds`; None for one rank."""
    if num_ranks() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=DEADLINE + timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def on_rank_zero(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 alone; return its result on all ranks."""
    return from_rank_zero(function() if this_rank() == 0 else None)


class _HostPickler(pickle.Pickler):
    """Pickles GPU tensors as host tensors, since another rank has another GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
