"""A worker process: reads one item at a time from stdin, and writes its outcome to stdout.

Started by `WorkerPool` as `python -m trustbatch.utils.worker PARENT`. It imports neither torch
nor other slow modules, unless its function does.
"""

import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from trustbatch.types import GradeStatus
from trustbatch.utils.supervisor import supervised

LENGTH = struct.Struct(">Q")
MAX_REASON_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one item: a value if the status is GRADED, otherwise a reason."""

    status: GradeStatus
    value: Any = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker."""

    function: bytes
    """the pickled function"""
    path: list[str]
    """sys.path of the process that pickled it"""
    memory_limit: int
    """bytes in addition to the worker's memory when it is ready"""


def run_grader(grade: Callable[[Any], Any], item: Any) -> Outcome:
    """Call a grader, and turn any exception into an outcome; an interrupt gets through."""
    try:
        return Outcome(GradeStatus.GRADED, grade(item))
    except MemoryError:
        return Outcome(GradeStatus.OUT_OF_MEMORY, reason="it asked for more memory than allowed")
    except RecursionError:
        return Outcome(GradeStatus.FAILED, reason="RecursionError: it called itself too deeply")
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        return Outcome(GradeStatus.FAILED, reason=describe(error))


def describe(error: BaseException) -> str:
    """Return an error as one short line."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON_LENGTH]


def encode_message(message: Any) -> bytes:
    """Return a pickled message, prefixed with its length."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(content)) + content


def main() -> None:
    """Do items until stdin is closed."""
    supervised(parent=int(sys.argv[1]))
    items = os.fdopen(os.dup(0), "rb")
    outcomes = os.fdopen(os.dup(1), "wb")
    # the function's own output must not mix with the outcomes, and it must not read the items
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    setup = _read(items)
    if not isinstance(setup, WorkerSetup):
        return
    # Ctrl-C reaches all processes of a terminal: the run decides what it means
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.path[:] = setup.path
    try:
        function = pickle.loads(setup.function)
        getattr(function, "prepare", lambda: None)()
    except Exception as error:  # importing a user's module may raise anything
        _write(outcomes, Outcome(GradeStatus.FAILED, reason=describe(error)))
        return
    _limit_memory(setup.memory_limit)
    _write(outcomes, Outcome(GradeStatus.GRADED))
    while (item := _read(items)) is not None:
        _write(outcomes, run_grader(function, item))


def _read(items: BinaryIO) -> Any:
    header = items.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return pickle.loads(items.read(LENGTH.unpack(header)[0]))


def _write(outcomes: BinaryIO, outcome: Outcome) -> None:
    outcomes.write(encode_message(outcome))
    outcomes.flush()


def _limit_memory(limit: int) -> None:
    if sys.platform != "linux":  # elsewhere the limit is not enforced, or measures something else
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + limit, hard))


if __name__ == "__main__":
    # outcomes must be pickled under this module's full name, not as __main__
    from trustbatch.utils import worker

    worker.main()
