"""Transfer by process group: from the first trainer's device to an engine's, with no stop between.

The first trainer keeps a copy of each version that may still be requested, on its own device. An
engine that needs a version requests it through the trainer's rendezvous, and a thread sends it
through a process group of the two, while training continues.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trustbatch.weight_sync.buckets import Bucket, BucketLayout, pack_buckets
from trustbatch.weight_sync.process_group import TRAINER, Backend, TransferGroup
from trustbatch.weight_sync.publications import Endpoint, Weights
from trustbatch.weight_sync.receiver import first_line, gpu_uuid, receiver_for
from trustbatch.weight_sync.rendezvous import (
    POLL_SECONDS,
    Rendezvous,
    RendezvousAddress,
    TransferReply,
    TransferRequest,
)

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class ProcessGroupPublication:
    """A version that the first trainer holds until it is requested."""

    address: RendezvousAddress
    version: int
    layouts: tuple[BucketLayout, ...]
    on_gpu: bool
    seconds: float

    def tensors(self, endpoint: Endpoint) -> Weights:
        """Request and receive the weights, as views of received buckets."""
        receiver = receiver_for(self.address, endpoint, self.seconds)
        return receiver.receive(self.version, self.layouts, on_gpu=self.on_gpu)


@dataclass(frozen=True)
class _LiveVersion:
    """A copy of the weights."""

    buckets: Sequence[Bucket]
    written: Any
    """the event after which a GPU's copy is complete; None in host memory"""

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> "_LiveVersion":
        device = buckets[0].content.device
        if device.type != "cuda":
            return cls(buckets, None)
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(device))
        return cls(buckets, written)

    @property
    def device(self) -> torch.device:
        return self.buckets[0].content.device


class ProcessGroupPublisher:
    """Keeps the live versions and sends each to the engines that request it, in threads.

    No engine can delay another: the thread that serves it ends at the deadline at the latest, and
    its transfer group is used by no one else.
    """

    def __init__(self, *, address: str, seconds: float, dtype: torch.dtype | None = None) -> None:
        """Listen at `address`, an IP address of this machine.

        `dtype` is what engines round all weights to (default: weights keep their dtype).
        """
        self.address = address
        self.seconds = seconds
        self.dtype = dtype
        self._rendezvous = Rendezvous.open(address)
        self._live: dict[int, _LiveVersion] = {}
        self._groups: dict[str, tuple[str, TransferGroup]] = {}
        """name and transfer group, by engine"""
        self._num_groups = 0
        self._changing = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="weights", daemon=True)
        self._thread.start()

    @property
    def live_bytes(self) -> int:
        """Size of all copies."""
        with self._changing:
            versions = list(self._live.values())
        return sum(bucket.layout.num_bytes for live in versions for bucket in live.buckets)

    def publish(self, weights: Weights, version: int) -> ProcessGroupPublication:
        """Copy the weights, on their device."""
        live = _LiveVersion.of(pack_buckets(weights, dtype=self.dtype))
        with self._changing:
            self._live[version] = live
        return ProcessGroupPublication(
            address=self._rendezvous.address,
            version=version,
            layouts=tuple(bucket.layout for bucket in live.buckets),
            on_gpu=live.device.type == "cuda",
            seconds=self.seconds,
        )

    def forget(self, publication: ProcessGroupPublication) -> None:
        """Free the copy, once running transfers of it have ended."""
        with self._changing:
            self._live.pop(publication.version, None)

    def drop_engine(self, engine: str) -> None:
        """Cancel transfers to a dead engine."""
        with self._changing:
            _, group = self._groups.pop(engine, ("", None))
        if group is not None:
            # in a thread: aborting takes time, and the replacement engine waits for this call
            threading.Thread(target=group.abort, daemon=True).start()

    def close(self) -> None:
        """Cancel all transfers and free all versions."""
        self._closing = True
        self._rendezvous.close()
        self._thread.join(CLOSE_SECONDS)
        for engine in list(self._groups):
            self.drop_engine(engine)
        with self._changing:
            self._live.clear()

    def _listen(self) -> None:
        """Serve each request in a thread of its own."""
        rendezvous = self._rendezvous.address.connect(POLL_SECONDS)
        while (request := rendezvous.next_request()) is not None:
            threading.Thread(target=self._serve, args=(request,), daemon=True).start()

    def _serve(self, request: TransferRequest) -> None:
        deadline = time.monotonic() + self.seconds
        group = None
        try:
            with self._changing:
                is_live = request.version in self._live
                device = self._live[request.version].device if is_live else None
            if device is None:
                self._refuse(request)
                return
            with _own_stream(device) as stream:
                # no reference to the copy before the engine has connected, which it may never do
                group = self._agreed_group(request, device)
                self._send(request.version, group, stream, deadline)
        except RuntimeError as error:
            if group is not None:
                self._discard(request.engine, group)
            if not self._closing:
                reason = first_line(error)
                logger.warning(f"An engine did not get version {request.version} ({reason}).")

    def _send(self, version: int, group: TransferGroup, stream: Any, deadline: float) -> None:
        with self._changing:
            live = self._live.get(version)
        if live is None:
            raise RuntimeError("it was dropped meanwhile")
        if stream is not None:
            stream.wait_event(live.written)
        for bucket in live.buckets:
            content = bucket.content.to(group.device)
            group.send(content, max(deadline - time.monotonic(), 0.001))

    def _discard(self, engine: str, group: TransferGroup) -> None:
        """Abort a group; the engine may already have another one, which stays."""
        with self._changing:
            _, present = self._groups.get(engine, ("", None))
            if present is group:
                del self._groups[engine]
        group.abort()

    def _refuse(self, request: TransferRequest) -> None:
        reason = f"Version {request.version} of the weights was requested after it was dropped."
        self._rendezvous.address.connect(self.seconds).reply(request, TransferReply(refusal=reason))

    def _agreed_group(self, request: TransferRequest, device: torch.device) -> TransferGroup:
        """Return the engine's transfer group, or create one together with the engine."""
        rendezvous = self._rendezvous.address.connect(self.seconds)
        with self._changing:
            name, group = self._groups.get(request.engine, ("", None))
            self._num_groups += 1
            new_name = f"group/{self._num_groups}"
        if group is not None and name == request.group:
            rendezvous.reply(request, TransferReply(name, group.backend))
            return group
        backend = _backend(device, request.gpu)
        rendezvous.reply(request, TransferReply(new_name, backend))
        group = TransferGroup(
            rendezvous.store_of(new_name),
            TRAINER,
            backend=backend,
            address=self.address,
            seconds=self.seconds,
        )
        with self._changing:
            self._groups[request.engine] = new_name, group
        return group


@contextmanager
def _own_stream(device: torch.device) -> Iterator[Any]:
    """Let a thread use a GPU without blocking the trainer's stream."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream


def _backend(device: torch.device, engine_gpu: str) -> Backend:
    if device.type != "cuda" or not engine_gpu:
        return Backend.GLOO
    if engine_gpu == gpu_uuid(device):
        logger.warning(
            "An engine shares the first trainer's GPU, which NCCL does not support: its weights "
            'go through host memory; cluster.weight_transfer = "shared_memory" is faster.'
        )
        return Backend.GLOO
    return Backend.NCCL
