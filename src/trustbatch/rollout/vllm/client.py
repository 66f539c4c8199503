"""The client of a vLLM process: starts it, calls it with timeouts, and notices its death."""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from trustbatch.errors import DeadEngineError, EngineError
from trustbatch.rollout.vllm.requests import GOODBYE, HostSettings, SampleRequest, SampleResult
from trustbatch.utils.processes import kill_group
from trustbatch.utils.terminal import LiveLine
from trustbatch.weight_sync.weight_chunks import Chunk

CLOSE_SECONDS = 20.0
"""that vLLM has to exit before it is killed"""
MESSAGE_SECONDS = 60
"""timeout of one message through the socket once it has begun"""
LOG_LINES = 3
"""last lines of vLLM's log that an error quotes"""


class VllmClient:
    """A vLLM process of its own: the same calls as `VllmHost`, each with a timeout."""

    def __init__(
        self,
        settings: HostSettings,
        *,
        devices: str | None,
        log_folder: Path | None,
        start_seconds: float,
        update_seconds: float,
    ) -> None:
        self._update_seconds = update_seconds
        self._log = Path(settings.folder) / "vllm.log"  # removed with the folder
        self._is_log_kept = log_folder is not None
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
            self._log = _new_log(log_folder)
        near, far = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            # a process that stops in the middle of a message must not block this one
            near.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))
        # vLLM would use the trainer's rank as its own
        environment = {key: value for key, value in os.environ.items() if not _of_torchrun(key)}
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "trustbatch.rollout.vllm.server"]
            self._process = subprocess.Popen(
                [*command, str(far.fileno()), str(os.getpid()), settings.folder],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        far.close()
        self._connection = Connection(near.detach())
        # signals its death even if other processes have inherited the far end of the socket
        self._death = os.pidfd_open(self._process.pid)
        # also at interpreter exit, and if the engine is never closed
        self._end = weakref.finalize(self, _end, self._process, self._connection, self._death)
        line = LiveLine()
        line.show("Starting vLLM, which takes from half a minute to a few ...")
        started = time.monotonic()
        self._call("start", settings, awaited="to start", seconds=start_seconds, key="start")
        line.show(f"vLLM started in {time.monotonic() - started:.0f} s.", last=True)

    @property
    def pid(self) -> int:
        """Process id of vLLM, which is also its process group."""
        return self._process.pid

    def describe(self) -> dict[str, Any]:
        """Return facts for logs and reports."""
        return self._call("describe", awaited="to describe itself", seconds=self._update_seconds)

    def generate(self, requests: Sequence[SampleRequest], seconds: float) -> list[SampleResult]:
        """Sample all completions in the other process."""
        awaited = f"to sample {len(requests)} completions"
        # the server has the same deadline and a better error message: let it raise first
        grace = min(5.0, seconds)
        return self._call(
            "generate", requests, seconds, awaited=awaited, seconds=seconds + grace, key="generate"
        )

    def begin_update(self) -> None:
        """Get ready for new weights."""
        self._call("begin_update", awaited="to begin a weight update", seconds=self._update_seconds)

    def update(self, chunk: Chunk) -> None:
        """Load some of the weights."""
        self._call("update", chunk, awaited="to load weights", seconds=self._update_seconds)

    def finish_update(self) -> None:
        """Sample from the new weights from now on."""
        self._call(
            "finish_update", awaited="to finish a weight update", seconds=self._update_seconds
        )

    def load_adapters(self, folder: str) -> None:
        """Sample from other adapters from now on."""
        self._call(
            "load_adapters", folder, awaited="to load adapters", seconds=self._update_seconds
        )

    def sleep(self) -> None:
        """Free the GPU memory."""
        self._call("sleep", awaited="to fall asleep", seconds=self._update_seconds)

    def wake(self) -> None:
        """Allocate the memory again."""
        self._call("wake", awaited="to wake up", seconds=self._update_seconds)

    def close(self) -> None:
        """Let vLLM exit, then kill the rest of its process group; its log is of no use any more."""
        if self._end.alive:
            self._end()
            self._log.unlink(missing_ok=True)

    def _call(
        self, method: str, *values: Any, awaited: str, seconds: float, key: str = "update"
    ) -> Any:
        """Call a method and wait for its result, the process's death or the timeout."""
        if not self._end.alive:
            raise DeadEngineError(
                f"vLLM has exited, so it can't be asked {awaited}: start the run again."
            )
        try:
            self._connection.send((method, values))
            if not wait([self._connection, self._death], timeout=seconds):
                raise self._failure(
                    # a replacement would start as slowly
                    EngineError if key == "start" else DeadEngineError,
                    f"Timed out after {seconds:g} seconds of waiting for vLLM {awaited}: raise "
                    f"rollout.vllm.{key}_seconds if it was busy",
                )
            if not self._connection.poll():
                raise self._failure(DeadEngineError, self._exit_reason(awaited))
            kind, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._failure(DeadEngineError, self._exit_reason(awaited)) from error
        if kind == "refused":
            raise EngineError(result)
        if kind != "done":
            dead = DeadEngineError if kind == "died" else EngineError
            raise self._failure(dead, f"vLLM failed {awaited}: {result}")
        return result

    def _exit_reason(self, awaited: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_SECONDS)
        return (
            f"The vLLM process exited with status {self._process.returncode} when asked "
            f"{awaited}: see its log for the reason; the same command continues the run"
        )

    def _failure(self, kind: type[EngineError], sentence: str) -> EngineError:
        """Kill the process, keep its log, and return an error that quotes the end of the log."""
        kill_group(self.pid)
        self._end()
        kept = self._log
        if not self._is_log_kept:
            kept = _new_log(Path(tempfile.gettempdir()))
            shutil.copyfile(self._log, kept)
        lines = kept.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        quoted = " / ".join(line.strip() for line in lines)
        return kind(f"{sentence} (log in {kept}{', ends with: ' if quoted else ''}{quoted}).")


def _new_log(folder: Path) -> Path:
    """Make a file that only this user can read, under a name that nobody can know before."""
    descriptor, name = tempfile.mkstemp(prefix="vllm-", suffix=".log", dir=folder)
    os.close(descriptor)
    return Path(name)


def _of_torchrun(key: str) -> bool:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return key in names or key.startswith(("GROUP_", "ROLE_", "TORCHELASTIC_"))


def _end(process: subprocess.Popen[bytes], connection: Connection, death: int) -> None:
    """Ask the server to exit, wait for a while, and kill its process group with all workers."""
    with contextlib.suppress(OSError):  # it may have exited already
        connection.send((GOODBYE, ()))
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=CLOSE_SECONDS)
    kill_group(process.pid)
    process.wait()
    os.close(death)
