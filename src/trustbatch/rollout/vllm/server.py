"""The process that hosts vLLM: `python -m trustbatch.rollout.vllm.server SOCKET PARENT FOLDER`.

It has its own process group and serves one client over an inherited socket pair; it opens no port.
When the client is gone it kills its whole process group.
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
    """Serve calls until the client says goodbye."""
    socket, parent, folder = int(arguments[0]), int(arguments[1]), arguments[2]
    end_with(parent, folder)
    os.environ[SERVER_PID] = str(os.getpid())
    # it goes into the log, which error messages quote
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    connection = Connection(socket)
    host: Any = None
    while True:
        try:
            method, values = connection.recv()
        except EOFError:
            # no goodbye: the client is dead, so end all processes that worked for it
            end_group(folder)
        if method == GOODBYE:
            break
        try:
            if method == "start":
                # imported here, so that the client's timeout covers the import
                from trustbatch.rollout.vllm.host import VllmHost

                host, result = VllmHost(*values), None
                for core in active_children():
                    assert core.pid is not None, "it was started"
                    # vLLM itself waits forever for a core that was killed
                    end_with(core.pid)
            else:
                result = getattr(host, method)(*values)
        except EngineError as error:
            connection.send(("refused", str(error)))
        except Exception as error:  # any error must reach the client
            connection.send(("died" if _is_of_dead_core(error) else "failed", _in_one_line(error)))
            raise
        else:
            connection.send(("done", result))
    if host is not None:
        host.close()


def _is_of_dead_core(error: Exception) -> bool:
    """Whether vLLM has noticed that a process of its own is dead."""
    exceptions: Any = sys.modules.get(
        "vllm.v1.engine.exceptions"
    )  # missing if vLLM was not imported
    return exceptions is not None and isinstance(error, exceptions.EngineDeadError)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


if __name__ == "__main__":
    main(sys.argv[1:])
