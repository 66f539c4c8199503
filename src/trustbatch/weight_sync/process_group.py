"""A process group of two, the first trainer and one engine, separate from all other groups."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

TRAINER, ENGINE = 0, 1
NCCL_ENVIRONMENT = {
    # by default the watchdog ends this process when a peer dies: it must only end the communicator
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # wait for the bytes themselves, not for their place in a stream
    "TORCH_NCCL_BLOCKING_WAIT": "1",
}
"""read by torch when a group is created"""
POLL_SECONDS = 2e-4
_creating = threading.Lock()


class Backend(StrEnum):
    """What transfers the bytes."""

    NCCL = "nccl"
    """from one GPU to another"""
    GLOO = "gloo"
    """between processes, from host memory to host memory"""


class TransferGroup:
    """Sends tensors from the first trainer to one engine; both use the same order.

    The constructor waits for the other member. Every method raises RuntimeError on failure, after
    which the group can't be used any more.
    """

    def __init__(
        self, store: Store, rank: int, *, backend: Backend, address: str, seconds: float
    ) -> None:
        self.backend = backend
        self._is_canceled = threading.Event()
        self._transferring = threading.Lock()
        self._peer = ENGINE if rank == TRAINER else TRAINER
        create = _nccl_group if backend == Backend.NCCL else _gloo_group
        self._group: Any = create(store, rank, address, timedelta(seconds=seconds))
        # NCCL connects with the first message: do it now, before a version is held for it
        greeting = torch.zeros(1, dtype=torch.uint8, device=self.device)
        transfer = self.send if rank == TRAINER else self.receive
        transfer(greeting, seconds)

    @property
    def device(self) -> str:
        """Where tensors must be to be sent or received."""
        return "cuda" if self.backend == Backend.NCCL else "cpu"

    def send(self, content: Tensor, seconds: float) -> None:
        """Return when the other member has the tensor."""
        with self._transferring:
            self._finish(self._group.send([content], self._peer, 0), seconds)

    def receive(self, content: Tensor, seconds: float) -> None:
        """Fill a tensor with what the other member sends."""
        with self._transferring:
            self._finish(self._group.recv([content], self._peer, 0), seconds)

    def abort(self) -> None:
        """Cancel a running transfer: unlike gloo, NCCL does not notice that a peer is dead."""
        self._is_canceled.set()
        if self.backend == Backend.GLOO:
            self._group.abort()
            return
        with self._transferring:  # a transfer that was under way has ended
            self._group.abort()

    def _finish(self, work: Any, seconds: float) -> None:
        """Wait until a transfer is done or canceled."""
        # NCCL's communicator must not be aborted by one thread while another waits for it: the
        # process would end with a segmentation fault. So the waiting thread does it.
        deadline = time.monotonic() + seconds
        while self.backend == Backend.NCCL and not work.is_completed():
            if self._is_canceled.is_set() or time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError("the transfer was canceled, or its time was over")
            time.sleep(POLL_SECONDS)
        work.wait(timedelta(seconds=seconds))


def _gloo_group(store: Store, rank: int, address: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # the published types lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]  # listens on this address only
    options._threads = 2
    options._timeout = timeout
    return gloo(store, rank, 2, options)


def _nccl_group(store: Store, rank: int, address: str, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _creating, _environment(NCCL_ENVIRONMENT):
        return nccl(store, rank, 2, options)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
