"""The rendezvous: where engines ask the first trainer for weights, and the two agree on a link."""

import json
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trustbatch.cluster.interface import listener_at
from trustbatch.weight_sync.process_group import Backend

ASKS = "asks"
PATIENCE = 86_400.0
"""seconds until the owner looks into an empty box again"""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What an engine puts into the box."""

    engine: str
    version: int
    group: str
    """the link that it has; "" if it has none"""
    gpu: str
    """where it can receive; "" is host memory"""
    answer_at: str


@dataclass(frozen=True, slots=True)
class TransferReply:
    """What it gets: the link through which the weights come, or why they don't."""

    group: str = ""
    backend: Backend = Backend.GLOO
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class PostboxAddress:
    """Where a box can be reached."""

    host: str
    port: int

    def reached(self, seconds: float) -> "Rendezvous":
        """Return the box for another process, or for another thread: a client serves only one."""
        return Rendezvous(
            TCPStore(
                self.host,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )
        )


class Rendezvous:
    """A box as one client of it sees it. What goes wrong is a RuntimeError, deadlines too."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store

    @classmethod
    def opened(cls, host: str) -> "Rendezvous":
        """Open a box of this process that is reached through one address of the machine only."""
        listener = listener_at(host)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE),
            # a store that makes its own socket listens to the whole network
            master_listen_fd=listener.detach(),
        )
        return cls(store)

    @property
    def address(self) -> PostboxAddress:
        """Where others reach it."""
        return PostboxAddress(self.store.host, self.store.port)

    def ask(self, ask: TransferRequest, seconds: float) -> TransferReply:
        """Ask, and wait for the answer."""
        self.store.queue_push(ASKS, json.dumps(asdict(ask)))
        self.store.wait([ask.answer_at], timedelta(seconds=seconds))
        fields = json.loads(self.store.get(ask.answer_at))
        self.store.delete_key(ask.answer_at)
        return TransferReply(fields["group"], Backend(fields["backend"]), fields["refusal"])

    def answer(self, ask: TransferRequest, answer: TransferReply) -> None:
        """Answer; does not wait for whoever asked."""
        self.store.set(ask.answer_at, json.dumps(asdict(answer)))

    def next_ask(self) -> TransferRequest | None:
        """Wait for the next one; None when the box is closed."""
        while True:
            try:
                content = self.store.queue_pop(ASKS)
            except dist.DistStoreError:
                continue
            return TransferRequest(**json.loads(content)) if content else None

    def close(self) -> None:
        """Tell whoever waits for the next ask that there will be none."""
        self.store.queue_push(ASKS, b"")

    def meeting(self, group: str) -> Store:
        """Return where the two members of a link find each other."""
        return PrefixStore(group, self.store)
