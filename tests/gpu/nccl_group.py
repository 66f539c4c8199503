"""A transfer group over NCCL of two processes on one GPU, which NCCL takes for two machines.

`python nccl_group.py` is the trainer, and starts the engines.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import torch

from trustbatch.weight_sync.process_group import ENGINE, TRAINER, Backend, TransferGroup
from trustbatch.weight_sync.rendezvous import Rendezvous, RendezvousAddress

HOST = "127.0.0.1"
SECONDS = 60.0
SIZE = 2**26


def start_engine(rendezvous: Rendezvous, group: str, manner: str) -> subprocess.Popen[bytes]:
    """Start the other end in a process that claims to be on another machine."""
    return subprocess.Popen(
        [sys.executable, __file__, str(rendezvous.address.port), group, manner],
        env=os.environ | {"NCCL_HOSTID": f"engine-{group}"},
    )


def be_engine(port: str, name: str, manner: str) -> None:
    """Take one tensor, or end before it comes."""
    rendezvous = RendezvousAddress(HOST, int(port)).connect(SECONDS)
    group = TransferGroup(
        rendezvous.store_of(name), ENGINE, backend=Backend.NCCL, address=HOST, seconds=SECONDS
    )
    content = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    if manner == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    group.receive(content, SECONDS)
    expected = torch.arange(SIZE, device="cuda") % 251
    assert torch.equal(content, expected.to(torch.uint8))


def be_trainer() -> None:
    """Send to a sound engine, to one that dies, and to a sound one again."""
    rendezvous = Rendezvous.open(HOST)
    content = (torch.arange(SIZE, device="cuda") % 251).to(torch.uint8)
    for number, manner in enumerate(("sound", "dies", "sound")):
        engine = start_engine(rendezvous, f"group-{number}", manner)
        group = TransferGroup(
            rendezvous.address.connect(SECONDS).store_of(f"group-{number}"),
            TRAINER,
            backend=Backend.NCCL,
            address=HOST,
            seconds=SECONDS,
        )
        failures: list[str] = []

        def send(group: TransferGroup = group, failures: list[str] = failures) -> None:
            try:
                group.send(content, SECONDS)
            except RuntimeError as error:
                failures.append(str(error))

        sender = threading.Thread(target=send)
        sender.start()
        if manner == "dies":
            engine.wait(SECONDS)
            group.abort()
        sender.join(SECONDS / 2)
        assert not sender.is_alive(), "it waits for a dead engine"
        assert bool(failures) == (manner == "dies"), failures
        assert (engine.wait(SECONDS) == 0) == (manner == "sound")
        torch.cuda.synchronize()  # nothing on this GPU waits for the engine either
    time.sleep(5)  # and no watchdog ends this process, which it does late


if __name__ == "__main__":
    if len(sys.argv) == 1:
        be_trainer()
    else:
        be_engine(*sys.argv[1:])
