"""Processes that a test has started: found by their ancestors, since other tests run beside it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from trustbatch.observe.run_folder import read_metrics

LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1, the same as an IPv6 address, and ::1, as the kernel writes them"""


def descendants(pid: int) -> set[int]:
    """A process and all that it, or what it started, has started."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # the name in brackets may hold spaces; the parent is the second field after it
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def listening(pids: set[int]) -> set[tuple[int, str]]:
    """Process and address of each TCP socket that some processes listen on."""
    inodes: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = fields[1].rpartition(":")[0]
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(file)
                    if target in inodes:
                        found.add((pid, inodes[target]))
    return found


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files of /dev/shm that some processes have mapped; those of others are left aside."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]
                if path and not path.endswith("(deleted)"):
                    found.add(Path("/dev/shm") / path)
    return found


def command_line(pid: int) -> bytes:
    """A process's command line; nothing once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def actors(kind: str) -> list[int]:
    """Processes of all actors of a class: Ray names them so; those of other tests are theirs."""
    own = sorted(descendants(os.getpid()))
    return [pid for pid in own if command_line(pid).startswith(f"ray::{kind}".encode())]


def kill_meanwhile(folder: Path, plan: list[tuple[int, str, int]]) -> threading.Thread:
    """Kill so many actors of a kind once so many steps are written down, for each of the plan."""

    def work() -> None:
        for step, kind, count in plan:
            deadline = time.monotonic() + 120
            while len(read_metrics(folder)) < step or len(actors(kind)) < count:
                assert time.monotonic() < deadline, f"{count} {kind} are not there at step {step}"
                time.sleep(0.01)
            for pid in actors(kind)[:count]:
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=work)
    thread.start()
    return thread
