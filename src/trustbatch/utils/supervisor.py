"""The parent of a grading process: whatever a grader starts ends with it.

A child that leaves its process group, or that its own parent has left behind, becomes a child of
the supervisor (Linux's "subreaper"), which kills all that it has when the grader or the run ends.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def supervised(parent: int) -> None:
    """Return in a child process; this one stays behind and ends with it, in the same way.

    SIGTERM ends both, and everything that the child has started. Elsewhere than on Linux there is
    no such process: the process group is all that ends.
    """
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _kill_all)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the run has already ended
        os._exit(1)
    supervisor = os.getpid()
    grader = os.fork()
    if grader:
        _supervise(grader)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # also if it is stuck in a loop of C
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def _supervise(grader: int) -> NoReturn:
    """Wait for the grader, kill what it leaves behind, and end as it did."""
    # the pipes must be the grader's alone, so that their end is seen when it ends
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    status = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.wait()
            if pid == grader:
                status = ended
                _kill_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _kill_all(number: int = 0, frame: FrameType | None = None) -> None:
    """Kill all descendants, until there is no new one."""
    own = os.getpid()
    killed: set[int] = set()
    while new := _descendants(own) - killed:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= new


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end during the scan
            # the name in brackets may have spaces; the parent is the second field after it
            fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(process.name)] = int(fields[1])
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}
