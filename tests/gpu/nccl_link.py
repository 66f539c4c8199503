"""A link over NCCL whose two ends are processes on one GPU, which NCCL takes for two machines.

`python nccl_link.py` is the trainer's end, and starts the engines' ends.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import torch

from trustbatch.cluster.rendezvous import PostboxAddress, Rendezvous
from trustbatch.weight_sync.process_group import ENGINE, TRAINER, Backend, Link

HOST = "127.0.0.1"
SECONDS = 60.0
SIZE = 2**26


def start_engine(box: Rendezvous, group: str, manner: str) -> subprocess.Popen[bytes]:
    """Start the other end in a process that claims to be on another machine."""
    return subprocess.Popen(
        [sys.executable, __file__, str(box.address.port), group, manner],
        env=os.environ | {"NCCL_HOSTID": f"engine-{group}"},
    )


def be_engine(port: str, group: str, manner: str) -> None:
    """Take one tensor, or end before it comes."""
    box = PostboxAddress(HOST, int(port)).reached(SECONDS)
    link = Link(box.meeting(group), ENGINE, backend=Backend.NCCL, address=HOST, seconds=SECONDS)
    content = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    if manner == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    link.receive(content, SECONDS)
    expected = torch.arange(SIZE, device="cuda") % 251
    assert torch.equal(content, expected.to(torch.uint8))


def be_trainer() -> None:
    """Send to a sound engine, to one that dies, and to a sound one again."""
    box = Rendezvous.opened(HOST)
    content = (torch.arange(SIZE, device="cuda") % 251).to(torch.uint8)
    for number, manner in enumerate(("sound", "dies", "sound")):
        engine = start_engine(box, f"group-{number}", manner)
        link = Link(
            box.address.reached(SECONDS).meeting(f"group-{number}"),
            TRAINER,
            backend=Backend.NCCL,
            address=HOST,
            seconds=SECONDS,
        )
        failures: list[str] = []

        def send(link: Link = link, failures: list[str] = failures) -> None:
            try:
                link.send(content, SECONDS)
            except RuntimeError as error:
                failures.append(str(error))

        sender = threading.Thread(target=send)
        sender.start()
        if manner == "dies":
            engine.wait(SECONDS)
            link.break_off()
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
