"""Ending a helper's process group when the process that it works for is gone."""

import os
import select
import shutil
import signal
import threading


def end_with(pid: int, folder: str | None = None) -> None:
    """Kill this process group, and remove a folder, as soon as the process `pid` has ended.

    From a thread: the main one may be deep inside a kernel by then.
    """
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        _end(folder)
        return

    def watch() -> None:
        select.select([watched], [], [])
        _end(folder)

    threading.Thread(target=watch, daemon=True, name=f"lifeline-{pid}").start()


def _end(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
