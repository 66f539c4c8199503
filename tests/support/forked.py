"""Real processes that start at once: forked from one that has imported all that a run imports.

Importing torch and transformers takes seconds of a core, which a test of signals, kills or ranks
would otherwise pay for each process. Processes have a memory, an environment and an end of their
own; only the interpreter's start is shared. What is about that start uses `subprocess`.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trustbatch.cli import main

ROOT = Path(__file__).parents[2]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "trustbatch.build.session",
        "tests.support.forked",
        "tests.support.checkpoint_ranks",
    ]
)


def make_process(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A process of `multiprocessing`, not started yet."""
    with contextlib.chdir(ROOT):  # where a server finds what it is to import
        multiprocessing.forkserver.ensure_running()
    return _processes.Process(target=function, args=arguments, **options)


class Forked:
    """A process and what it has written."""

    def __init__(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._output = tempfile.TemporaryDirectory(prefix="forked-")
        surroundings = {
            "folder": folder or Path.cwd(),
            "environment": os.environ | (environment or {}),
            "output": Path(self._output.name),
            "num_threads": torch.get_num_threads(),
        }
        self._process = make_process(_run, function, arguments, kwargs=surroundings)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Of an ended process, as `subprocess` says it: minus the number of a signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 120) -> int:
        """Wait for its end."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it has not ended within {timeout} s"
        return self._process.exitcode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for its end; return what it has written to its two streams."""
        self.wait(timeout)
        return self.written("stdout"), self.written("stderr")

    def written(self, stream: str) -> str:
        """Return what it has written so far."""
        file = Path(self._output.name, stream)
        return file.read_text() if file.exists() else ""


def _run(
    function: Callable[..., int | None],
    arguments: tuple[Any, ...],
    *,
    folder: Path,
    environment: dict[str, str],
    output: Path,
    num_threads: int,
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    # tests that run in the background of a shell have inherited deafness to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(num_threads)
    try:
        sys.exit(function(*arguments))
    finally:
        atexit._run_exitfuncs()  # as an interpreter does at its end


@contextlib.contextmanager
def process(
    function: Callable[..., int | None], *arguments: Any, folder: Path | None = None
) -> Iterator[Forked]:
    """A function in a process, which ends with the block; its result is how the process ends."""
    started = Forked(function, *arguments, folder=folder)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def command(
    *words: str | Path, folder: Path | None = None
) -> contextlib.AbstractContextManager[Forked]:
    """The command line in a process, which ends with the block."""
    return process(main, [str(word) for word in words], folder=folder)


def in_ranks(
    num_ranks: int, function: Callable[..., int | None], *arguments: Any, status: int = 0
) -> str:
    """Run a function in processes with torchrun's variables; return what they have written."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = [
        Forked(
            function,
            *arguments,
            environment={
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
                **{"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            },
        )
        for rank in range(num_ranks)
    ]
    try:
        written = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, written, strict=True):
        assert process.returncode == status, errors[-4000:]
    return "".join(text for pair in written for text in pair)
