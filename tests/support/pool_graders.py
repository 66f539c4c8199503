"""Graders that misbehave, for the tests of the pool; this file must not import torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trustbatch.types import Prompt


def grade(what: str) -> float:
    match what:
        case "raise":
            raise ValueError("no such answer")
        case "exit":
            os._exit(3)
        case "sysexit":
            sys.exit("enough")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            return float(len(bytearray(2**30)))  # twice what the tests allow
        case "sleep":
            time.sleep(1e6)
        case "spin":  # in C, where no signal handler of Python runs and no thread gets its turn
            return float(9 ** (9**9))
        case "recursion":
            return grade(what) + 1.0
        case "print":
            for _ in range(1000):
                os.write(1, b"x" * 10_000)
                sys.stderr.write("x" * 10_000)
        case "input":
            return float(input())
        case "torch":
            return float("torch" in sys.modules)
    return 1.0


class Odd:
    """A task whose grader does what the completion says."""

    name = "odd"

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), text="", answer="")

    def grade(self, prompt: Prompt, completion: str) -> float:
        if completion in ("nan", "inf", "1e308"):
            return float(completion)
        if completion == "text":
            return "1"  # type: ignore[return-value]
        return grade(completion)


def start_child(note: str) -> float:
    child = subprocess.Popen(["sleep", "1000"])
    Path(note).write_text(str(child.pid))
    time.sleep(1e6)
    return 1.0


def start_daemon(note: str) -> float:
    """Leave a process behind that has its own session, and no parent that knows it."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(note).write_text(str(os.getpid()))
            time.sleep(1e6)
        os._exit(0)
    os.wait()
    while not Path(note).exists() or not Path(note).read_text():
        time.sleep(0.01)
    return 1.0


def start_daemon_and_die(note: str) -> float:
    start_daemon(note)
    os._exit(3)


def variables(prefix: str) -> str:
    return " ".join(sorted(name for name in os.environ if name.startswith(prefix)))


def eat_memory(mib: int) -> float:
    return float(len(b"x" * (mib * 2**20)))


class Unloadable:
    def __call__(self, what: str) -> float:
        return 1.0

    def prepare(self) -> None:
        raise RuntimeError("not here")


class DiesAtStart(Unloadable):
    def prepare(self) -> None:
        os._exit(7)


class SleepsAtStart(Unloadable):
    def prepare(self) -> None:
        time.sleep(1e6)


class LoadsWhenAllowed:
    """Loads once the folder has a file `go`, and notes it there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, what: str) -> float:
        return grade(what)

    def prepare(self) -> None:
        while not (self.folder / "go").exists():
            time.sleep(0.01)
        (self.folder / f"loaded-{os.getpid()}").touch()


def brevity(prompt: str, completion: str, answer: str) -> float:
    return 1.0 / (1 + len(completion))


def with_details(prompt: str, completion: str, answer: str, details: dict[str, float]) -> float:
    return details["bonus"]


def batch_lengths(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    return [float("nan") if text == "nan" else float(len(text)) for text in completions]


def batch_too_short(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    return [1.0]


def batch_forever(prompts: list[str], completions: list[str], answers: list[str]) -> list[float]:
    time.sleep(1e6)
    return []
