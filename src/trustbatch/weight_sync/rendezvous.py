"""The rendezvous: where engines request weights from the first trainer and agree on a group."""

import json
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trustbatch.utils.network import listen_at
from trustbatch.weight_sync.process_group import Backend

REQUESTS = "requests"
POLL_SECONDS = 86_400.0
"""how long the owner waits for a request before it waits again"""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """An engine's request for one version of the weights."""

    engine: str
    version: int
    group: str
    """the transfer group that it has; "" if it has none"""
    gpu: str
    """UUID of the GPU that can receive; "" for host memory"""
    reply_key: str
    """of the store"""


@dataclass(frozen=True, slots=True)
class TransferReply:
    """The transfer group that will send the weights, or the reason why none will."""

    group: str = ""
    backend: Backend = Backend.GLOO
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Host and port of a rendezvous."""

    host: str
    port: int

    def connect(self, seconds: float) -> "Rendezvous":
        """Return a client; every process and every thread needs its own."""
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
    """One client of the rendezvous; its methods raise RuntimeError on failure and on timeout."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store

    @classmethod
    def open(cls, host: str) -> "Rendezvous":
        """Start the server in this process; it listens on one address of the machine only."""
        listener = listen_at(host)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=POLL_SECONDS),
            # a store that creates its own socket listens on all interfaces
            master_listen_fd=listener.detach(),
        )
        return cls(store)

    @property
    def address(self) -> RendezvousAddress:
        """Where clients connect."""
        return RendezvousAddress(self.store.host, self.store.port)

    def request(self, request: TransferRequest, seconds: float) -> TransferReply:
        """Send a request and wait for its reply."""
        self.store.queue_push(REQUESTS, json.dumps(asdict(request)))
        self.store.wait([request.reply_key], timedelta(seconds=seconds))
        fields = json.loads(self.store.get(request.reply_key))
        self.store.delete_key(request.reply_key)
        return TransferReply(fields["group"], Backend(fields["backend"]), fields["refusal"])

    def reply(self, request: TransferRequest, reply: TransferReply) -> None:
        """Reply to a request, without waiting for the engine to read it."""
        self.store.set(request.reply_key, json.dumps(asdict(reply)))

    def next_request(self) -> TransferRequest | None:
        """Wait for the next request; None after `close`."""
        while True:
            try:
                content = self.store.queue_pop(REQUESTS)
            except dist.DistStoreError:
                continue
            return TransferRequest(**json.loads(content)) if content else None

    def close(self) -> None:
        """End the wait for the next request."""
        self.store.queue_push(REQUESTS, b"")

    def store_of(self, group: str) -> Store:
        """Return the store in which the two members of a transfer group find each other."""
        return PrefixStore(group, self.store)
