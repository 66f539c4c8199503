"""The receiver: an engine's end of a transfer by process group."""

import time
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from trustbatch.errors import EngineError
from trustbatch.weight_sync.buckets import BucketLayout
from trustbatch.weight_sync.process_group import ENGINE, TransferGroup
from trustbatch.weight_sync.publications import Endpoint
from trustbatch.weight_sync.rendezvous import RendezvousAddress, TransferRequest


class Receiver:
    """Requests versions from the first trainer, and receives them through a group of the two."""

    def __init__(self, address: RendezvousAddress, endpoint: Endpoint, seconds: float) -> None:
        self.endpoint = endpoint
        self.seconds = seconds
        self._rendezvous = address.connect(seconds)
        self._num_requests = 0
        self._group_name = ""
        self._group: TransferGroup | None = None

    def receive(
        self, version: int, layouts: Sequence[BucketLayout], *, on_gpu: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Request a version and yield its weights as they arrive.

        They are sent once: if the iteration stops early, the group is aborted.
        """
        deadline = time.monotonic() + self.seconds
        complete = False
        try:
            group = self._agreed_group(version, gpu_uuid() if on_gpu else "")
            for layout in layouts:
                content = torch.empty(layout.num_bytes, dtype=torch.uint8, device=group.device)
                group.receive(content, max(deadline - time.monotonic(), 0.001))
                yield from layout.tensors(content)
            complete = True
        except RuntimeError as error:
            raise EngineError(
                f"Version {version} of the weights did not arrive ({first_line(error)}): check "
                f"whether the first trainer still runs, raise cluster.transfer_seconds = "
                f'{self.seconds:g}, or set cluster.weight_transfer to "shared_memory".'
            ) from error
        finally:
            if not complete:
                self._abort()

    def _agreed_group(self, version: int, gpu: str) -> TransferGroup:
        """Return the transfer group through which the trainer will send the version."""
        self._num_requests += 1
        engine = self.endpoint.engine
        reply_key = f"{engine}/{self._num_requests}"
        request = TransferRequest(engine, version, self._group_name, gpu, reply_key)
        reply = self._rendezvous.request(request, self.seconds)
        if reply.refusal:
            raise EngineError(reply.refusal)
        if self._group is None or self._group_name != reply.group:
            self._group = TransferGroup(
                self._rendezvous.store_of(reply.group),
                ENGINE,
                backend=reply.backend,
                address=self.endpoint.address,
                seconds=self.seconds,
            )
            self._group_name = reply.group
        return self._group

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._group_name = None, ""


@cache
def receiver_for(address: RendezvousAddress, endpoint: Endpoint, seconds: float) -> Receiver:
    """Return this process's receiver for a trainer; created once, so that it keeps its group."""
    return Receiver(address, endpoint, seconds)


def gpu_uuid(device: torch.device | None = None) -> str:
    """Return the UUID of a GPU (default: the current one); "" where there is none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a final period."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
