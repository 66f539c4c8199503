"""The receiver: an engine's end of direct weight transfer."""

import time
from collections.abc import Iterator, Sequence
from functools import cache

import ray
import torch
from torch import Tensor

from trustbatch.cluster.rendezvous import PostboxAddress, TransferRequest
from trustbatch.errors import EngineError
from trustbatch.weight_sync.buckets import BucketLayout
from trustbatch.weight_sync.process_group import ENGINE, Link


class Receiver:
    """Asks the first trainer for versions, and takes them through a link that both keep."""

    def __init__(self, address: PostboxAddress, seconds: float) -> None:
        self.seconds = seconds
        self._box = address.reached(seconds)
        self._name: str = ray.get_runtime_context().get_actor_id() or ""
        self._num_asked = 0
        self._group = ""
        self._link: Link | None = None

    def receive(
        self, version: int, layouts: Sequence[BucketLayout], *, on_gpu: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Ask for a version and yield its weights as they come.

        They come once: what was begun must be taken to its end, or the link is given up.
        """
        deadline = time.monotonic() + self.seconds
        complete = False
        try:
            link = self._linked(version, gpu_name() if on_gpu else "")
            for layout in layouts:
                content = torch.empty(layout.num_bytes, dtype=torch.uint8, device=link.device)
                link.receive(content, max(deadline - time.monotonic(), 0.001))
                yield from layout.tensors(content)
            complete = True
        except RuntimeError as error:
            raise EngineError(
                f"Version {version} of the weights did not arrive ({_first(error)}): see whether "
                f"the first trainer still runs, raise cluster.transfer_seconds = "
                f'{self.seconds:g}, or set cluster.weight_transfer to "shared_memory".'
            ) from error
        finally:
            if not complete:
                self._part()

    def _linked(self, version: int, gpu: str) -> Link:
        """Return the link through which the version is coming."""
        self._num_asked += 1
        answer_at = f"{self._name}/{self._num_asked}"
        ask = TransferRequest(self._name, version, self._group, gpu, answer_at)
        answer = self._box.ask(ask, self.seconds)
        if answer.refusal:
            raise EngineError(answer.refusal)
        if self._link is None or self._group != answer.group:
            self._link = Link(
                self._box.meeting(answer.group),
                ENGINE,
                backend=answer.backend,
                address=ray.util.get_node_ip_address(),
                seconds=self.seconds,
            )
            self._group = answer.group
        return self._link

    def _part(self) -> None:
        if self._link is not None:
            self._link.break_off()
        self._link, self._group = None, ""


@cache
def receiver_at(address: PostboxAddress, seconds: float) -> Receiver:
    """Return the receiver of this process for a trainer; it is made once, and keeps its link."""
    return Receiver(address, seconds)


def gpu_name(device: torch.device | None = None) -> str:
    """Return what all processes know a GPU by, this process's own unless told; "" for none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
