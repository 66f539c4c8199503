"""A grading process: reads one item at a time from its input, and answers before the next.

Started by `GraderPool` as `python -m trustbatch.rewards.worker`. It imports neither torch nor
anything else that takes long, unless the grader itself does.
"""

import ctypes
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from trustbatch.types import GradeStatus

LENGTH = struct.Struct(">Q")
LONGEST_REASON = 500
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one item: a value if the status is GRADED, otherwise a reason."""

    status: GradeStatus
    value: Any = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker."""

    grade: bytes
    """the pickled function"""
    path: list[str]
    """sys.path of the process that it was pickled in"""
    memory_limit: int
    """bytes beyond what the worker holds when it is ready"""
    parent: int


def graded(grade: Callable[[Any], Any], item: Any) -> Outcome:
    """Call a grader, and turn whatever it raises into an outcome."""
    try:
        return Outcome(GradeStatus.GRADED, grade(item))
    except MemoryError:
        return Outcome(GradeStatus.OUT_OF_MEMORY, reason="it asked for more memory than allowed")
    except RecursionError:
        return Outcome(GradeStatus.FAILED, reason="RecursionError: it called itself too deeply")
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's code may raise anything
        return Outcome(GradeStatus.FAILED, reason=describe(error))


def describe(error: BaseException) -> str:
    """Return an error in one short line."""
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]


def frame(message: Any) -> bytes:
    """Return a message with its length before it."""
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(content)) + content


def main() -> None:
    """Serve until the input ends."""
    items = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # what a grader prints must not get between the answers, nor can it wait for input
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    start = _read(items)
    if not isinstance(start, Start):
        return
    _die_with(start.parent)
    sys.path[:] = start.path
    try:
        grade = pickle.loads(start.grade)
        getattr(grade, "prepare", lambda: None)()
    except Exception as error:  # whatever an import of a user's module raises
        _write(answers, Outcome(GradeStatus.FAILED, reason=describe(error)))
        return
    _limit_memory(start.memory_limit)
    _write(answers, Outcome(GradeStatus.GRADED))
    while (item := _read(items)) is not None:
        _write(answers, graded(grade, item))


def _read(items: BinaryIO) -> Any:
    header = items.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return pickle.loads(items.read(LENGTH.unpack(header)[0]))


def _write(answers: BinaryIO, outcome: Outcome) -> None:
    answers.write(frame(outcome))
    answers.flush()


def _die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, in whatever it is stuck by then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def _limit_memory(limit: int) -> None:
    if sys.platform != "linux":  # elsewhere the limit is not kept, or counts other things
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + limit, hard))


if __name__ == "__main__":
    # the pool reads this module by its full name, and so must what is pickled here
    from trustbatch.rewards import worker

    worker.main()
