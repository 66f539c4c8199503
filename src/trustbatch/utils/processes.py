"""Ending process groups: a helper process must not outlive the process that it works for."""

import contextlib
import os
import re
import select
import shutil
import signal
import threading
from pathlib import Path
from typing import NoReturn

SHARED_SEGMENT = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_)\S+")
"""shared memory of Python and vLLM, which outlives a process that does not remove it"""


def kill_group(group: int) -> None:
    """Kill all processes of a group, and remove the shared memory that they leave behind."""
    for segment in _shared_segments(group):
        Path(segment).unlink(missing_ok=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_with(pid: int, folder: str | None = None) -> None:
    """Kill this process group, and remove a folder, as soon as the process `pid` has ended.

    A thread waits for that, since the main thread may be inside a long kernel then.
    """
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        end_group(folder)

    def watch() -> None:
        select.select([watched], [], [])
        end_group(folder)

    threading.Thread(target=watch, daemon=True, name=f"lifeline-{pid}").start()


def end_group(folder: str | None) -> NoReturn:
    """Remove a folder, then kill this process group, including this process."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    kill_group(os.getpgid(0))
    raise AssertionError("a process outlived its own SIGKILL")


def _shared_segments(group: int) -> set[str]:
    """Return the shared-memory segments that processes of the group have mapped."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # a process may end during the scan
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                found.update(SHARED_SEGMENT.findall((process / "maps").read_text()))
    return found
