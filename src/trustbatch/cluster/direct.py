"""Direct weight transfer: from the first trainer's device to an engine's, without a stop between.

The first trainer keeps a copy of each version that may still be asked for, where its weights lie.
An engine that needs a version asks for it through the trainer's rendezvous, and a thread sends it
through a link between the two, while the trainer goes on.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch

from trustbatch.cluster.publications import Weights
from trustbatch.cluster.receiver import gpu_name, receiver_at
from trustbatch.cluster.rendezvous import (
    PATIENCE,
    PostboxAddress,
    Rendezvous,
    TransferReply,
    TransferRequest,
)
from trustbatch.weight_sync.buckets import Bucket, BucketLayout, packed
from trustbatch.weight_sync.process_group import TRAINER, Backend, Link

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class DirectPublication:
    """A version that the first trainer holds until it is asked for it."""

    address: PostboxAddress
    version: int
    layouts: tuple[BucketLayout, ...]
    on_gpu: bool
    seconds: float

    def tensors(self) -> Weights:
        """Have the weights sent; each is a view of what came, which nobody else uses."""
        receiver = receiver_at(self.address, self.seconds)
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


class DirectPublisher:
    """Keeps the live versions and sends them to engines that ask, each from a thread.

    Nothing that becomes of an engine is waited for by anyone else: its thread ends at the deadline
    at the latest, and its link is of no other use.
    """

    def __init__(self, *, seconds: float, dtype: torch.dtype | None = None) -> None:
        self.seconds = seconds
        self.dtype = dtype
        """what engines round the weights to, where that is one type for all"""
        self._box = Rendezvous.opened(ray.util.get_node_ip_address())
        self._live: dict[int, _LiveVersion] = {}
        self._links: dict[str, tuple[str, Link]] = {}
        """name and link, by engine"""
        self._num_links = 0
        self._changing = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
        self._thread.start()

    @property
    def live_bytes(self) -> int:
        """What the copies take."""
        with self._changing:
            versions = list(self._live.values())
        return sum(bucket.layout.num_bytes for live in versions for bucket in live.buckets)

    def publish(self, weights: Weights, version: int) -> DirectPublication:
        """Copy the weights, on their device."""
        live = _LiveVersion.of(packed(weights, dtype=self.dtype))
        with self._changing:
            self._live[version] = live
        return DirectPublication(
            address=self._box.address,
            version=version,
            layouts=tuple(bucket.layout for bucket in live.buckets),
            on_gpu=live.device.type == "cuda",
            seconds=self.seconds,
        )

    def forget(self, publication: DirectPublication) -> None:
        """Give the copy back, once those who are being sent it have it."""
        with self._changing:
            self._live.pop(publication.version, None)

    def drop_engine(self, engine: str) -> None:
        """Break off what is being sent to an engine that is no more."""
        with self._changing:
            _, link = self._links.pop(engine, ("", None))
        if link is not None:
            # not here: to abort takes its time, and the next engine is waited for
            threading.Thread(target=link.break_off, daemon=True).start()

    def close(self) -> None:
        """Forget everything."""
        self._closing = True
        self._box.close()
        self._thread.join(CLOSE_SECONDS)
        for engine in list(self._links):
            self.drop_engine(engine)
        with self._changing:
            self._live.clear()

    def _work(self) -> None:
        """Take asks out of the box, and have each served by a thread of its own."""
        box = self._box.address.reached(PATIENCE)
        while (ask := box.next_ask()) is not None:
            threading.Thread(target=self._serve, args=(ask,), daemon=True).start()

    def _serve(self, ask: TransferRequest) -> None:
        deadline = time.monotonic() + self.seconds
        link = None
        try:
            with self._changing:
                device = self._live[ask.version].device if ask.version in self._live else None
            if device is None:
                self._refuse(ask)
                return
            with _own_stream(device) as stream:
                # no copy is held before the engine has met this thread, which it may never do
                link = self._linked(ask, device)
                self._send(ask.version, link, stream, deadline)
        except RuntimeError as error:
            if link is not None:
                self._give_up(ask.engine, link)
            if not self._closing:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                logger.warning(f"An engine did not get version {ask.version} ({reason}).")

    def _send(self, version: int, link: Link, stream: Any, deadline: float) -> None:
        with self._changing:
            live = self._live.get(version)
        if live is None:
            raise RuntimeError("it was forgotten meanwhile")
        if stream is not None:
            stream.wait_event(live.written)
        for bucket in live.buckets:
            content = bucket.content.to(link.device)
            link.send(content, max(deadline - time.monotonic(), 0.001))

    def _give_up(self, engine: str, link: Link) -> None:
        """Part from an engine, unless it has asked again and has another link by now."""
        with self._changing:
            _, present = self._links.get(engine, ("", None))
            if present is link:
                del self._links[engine]
        link.break_off()

    def _refuse(self, ask: TransferRequest) -> None:
        why = f"Version {ask.version} of the weights was asked for after it was forgotten."
        self._box.address.reached(self.seconds).answer(ask, TransferReply(refusal=why))

    def _linked(self, ask: TransferRequest, device: torch.device) -> Link:
        """Agree with an engine on the link between the two, which may have to be made."""
        box = self._box.address.reached(self.seconds)
        with self._changing:
            name, link = self._links.get(ask.engine, ("", None))
            self._num_links += 1
            new_name = f"link/{self._num_links}"
        if link is not None and name == ask.group:
            box.answer(ask, TransferReply(name, link.backend))
            return link
        backend = _backend(device, ask.gpu)
        box.answer(ask, TransferReply(new_name, backend))
        link = Link(
            box.meeting(new_name),
            TRAINER,
            backend=backend,
            address=ray.util.get_node_ip_address(),
            seconds=self.seconds,
        )
        with self._changing:
            self._links[ask.engine] = new_name, link
        return link


@contextmanager
def _own_stream(device: torch.device) -> Iterator[Any]:
    """Let a thread use a GPU without the trainer's work having to wait for it."""
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream


def _backend(device: torch.device, engine_gpu: str) -> Backend:
    if device.type != "cuda" or not engine_gpu:
        return Backend.GLOO
    if engine_gpu == gpu_name(device):
        logger.warning(
            "An engine shares the first trainer's GPU, where NCCL can't tell the two apart: its "
            'weights go through host memory; cluster.weight_transfer = "shared_memory" is faster.'
        )
        return Backend.GLOO
    return Backend.NCCL
