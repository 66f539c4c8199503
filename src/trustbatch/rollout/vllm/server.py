"""The process that hosts vLLM: `python -m trustbatch.rollout.vllm.server SOCKET PARENT FOLDER`.

It has its own process group and answers one caller over an inherited pair of sockets; it listens
nowhere. When the caller is gone it takes its whole group with it, whatever it is doing.
"""

import os
import sys
from multiprocessing import active_children
from multiprocessing.connection import Connection
from typing import Any

from trustbatch.errors import EngineError
from trustbatch.rollout.vllm.requests import GOODBYE, SERVER_PID
from trustbatch.utils.processes import end_group, end_with


def main(arguments: list[str]) -> None:
    """Serve calls until the caller says goodbye."""
    socket, parent, folder = int(arguments[0]), int(arguments[1]), arguments[2]
    end_with(parent, folder)
    os.environ[SERVER_PID] = str(os.getpid())
    # here it goes into the log, which an error quotes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    connection = Connection(socket)
    host: Any = None
    while True:
        try:
            method, values = connection.recv()
        except EOFError:
            # without a goodbye: the caller is dead, and so must all be that worked for it
            end_group(folder)
        if method == GOODBYE:
            break
        try:
            if method == "start":
                # the caller waits for the import too, under its deadline
                from trustbatch.rollout.vllm.host import VllmHost

                host, result = VllmHost(*values), None
                for core in active_children():
                    assert core.pid is not None, "it was started"
                    # vLLM itself waits without end for one that was killed
                    end_with(core.pid)
            else:
                result = getattr(host, method)(*values)
        except EngineError as error:
            connection.send(("refused", str(error)))
        except Exception as error:  # whatever it is, the caller must hear of it
            connection.send(("died" if _is_of_dead_core(error) else "failed", _in_one_line(error)))
            raise
        else:
            connection.send(("done", result))
    if host is not None:
        host.close()


def _is_of_dead_core(error: Exception) -> bool:
    """Whether vLLM has noticed that a process of its own is gone."""
    exceptions: Any = sys.modules.get("vllm.v1.engine.exceptions")  # not there if it won't load
    return exceptions is not None and isinstance(error, exceptions.EngineDeadError)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


if __name__ == "__main__":
    main(sys.argv[1:])
