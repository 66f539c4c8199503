"""The process that hosts vLLM: `python -m trustbatch.rollout.vllm_server SOCKET PARENT FOLDER`.

It has its own process group and answers one caller over an inherited pair of sockets; it listens
nowhere. When the caller is gone it takes its whole group with it, whatever it is doing.
"""

import os
import select
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from trustbatch.errors import EngineError


def main(arguments: list[str]) -> None:
    """Serve calls until the caller hangs up."""
    socket, parent, folder = int(arguments[0]), int(arguments[1]), arguments[2]
    _end_with(parent, folder)
    # only this machine's processes meet here
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # here it goes into the log, which an error quotes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    connection = Connection(socket)
    host: Any = None
    while True:
        try:
            method, values = connection.recv()
        except EOFError:
            break
        try:
            if method == "start":
                # the caller waits for the import too, under its deadline
                from trustbatch.rollout.vllm_host import VllmHost

                host, result = VllmHost(*values), None
            else:
                result = getattr(host, method)(*values)
        except EngineError as error:
            connection.send(("refused", str(error)))
        except Exception as error:  # whatever it is, the caller must hear of it
            connection.send(("failed", _in_one_line(error)))
            raise
        else:
            connection.send(("done", result))
    if host is not None:
        host.close()


def _end_with(parent: int, folder: str) -> None:
    """Watch the caller from a thread: this one may be deep inside a kernel when it dies."""
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:  # it died before it could be watched
        _end(folder)

    def watch() -> None:
        select.select([watched], [], [])
        _end(folder)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


if __name__ == "__main__":
    main(sys.argv[1:])
