"""A task whose grader returns or does what no grader should; this file must not import torch."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tests.support import pool_graders


class Raising:
    """A number that is none."""

    def __float__(self) -> float:
        raise ValueError("\x1b[2Jno number")

    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


class Endless:
    def __float__(self) -> float:
        while True:
            time.sleep(1.0)


def _raise(error: BaseException) -> Any:
    raise error


def _nested() -> Any:
    found: Any = []
    for _ in range(100_000):
        found = [found]
    return found


def _close(descriptor: int) -> float:
    os.close(descriptor)
    return "closed"  # type: ignore[return-value]


def _bytes_to_parent(content: bytes) -> Any:
    """Write where the outcome goes, if that can be guessed."""
    for descriptor in range(1, 12):
        try:
            os.write(descriptor, content)
        except OSError:
            continue
    time.sleep(1e6)


class _Group(BaseException):
    """Not an Exception."""


HOSTILE: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "minus infinity": lambda: -float("inf"),
    "1e13": lambda: 1e13,
    "-1e308": lambda: -1e308,
    "10**400": lambda: 10**400,
    "a million digits": lambda: 10**1_000_000,
    "None": lambda: None,
    "text": lambda: "1",
    "nan as text": lambda: "nan",
    "bytes": lambda: b"1",
    "empty list": list,
    "list": lambda: [1.0],
    "tuple": lambda: (1.0, 0.0),
    "dictionary": lambda: {"reward": 1.0},
    "set": lambda: {1.0},
    "complex": lambda: 1 + 0j,
    "function": lambda: lambda: 1.0,
    "generator": lambda: (each for each in [1.0]),
    "class": lambda: float,
    "module": lambda: os,
    "object": object,
    "ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "decimal": lambda: Decimal("NaN"),
    "signaling decimal": lambda: Decimal("sNaN"),
    "huge fraction": lambda: Fraction(10**400),
    "raises in float": Raising,
    "never ends in float": Endless,
    "nested": _nested,
    "ValueError": lambda: _raise(ValueError("wrong")),
    "error without words": lambda: _raise(ValueError()),
    "control characters": lambda: _raise(ValueError("\x1b[2J\x1b]0;title\x07\r\n" * 50)),
    "a long error": lambda: _raise(ValueError("x" * 10_000_000)),
    "surrogates": lambda: _raise(ValueError("\ud800")),
    "MemoryError": lambda: _raise(MemoryError()),
    "RecursionError": lambda: pool_graders.grade("recursion"),
    "StopIteration": lambda: _raise(StopIteration(1.0)),
    "GeneratorExit": lambda: _raise(GeneratorExit()),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt()),
    "SystemExit": lambda: _raise(SystemExit(0)),
    "no Exception": lambda: _raise(_Group("odd")),
    "exit code 0": lambda: os._exit(0),
    "abort": os.abort,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "its group killed": lambda: os.killpg(0, signal.SIGKILL),
    "memory": lambda: pool_graders.grade("memory"),
    "sleeps": lambda: pool_graders.grade("sleep"),
    "spins in C": lambda: pool_graders.grade("spin"),
    "reads stdin": lambda: pool_graders.grade("input"),
    "waits for a thread": lambda: threading.Event().wait(),
    "closes its output": lambda: _close(1),
    "closes its input": lambda: _close(0),
    "closes what it finds": lambda: os.closerange(3, 64),
    "garbage to its parent": lambda: _bytes_to_parent(b"\xff" * 64),
    "a length without content": lambda: _bytes_to_parent(b"\0\0\0\0\0\0\0\x09"),
    "replaces sys.stdout": lambda: setattr(sys, "stdout", None),
}


class Hostile:
    """A task whose grader does what the completion names; anything else is right."""

    name = "hostile"

    def prompt(self, index: int) -> Any:
        return pool_graders.Odd().prompt(index)

    def grade(self, prompt: Any, completion: str) -> float:
        return HOSTILE[completion]() if completion in HOSTILE else 1.0
