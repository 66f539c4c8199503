"""Graders that misbehave, for the tests of the pool; this file must not import torch."""

import os
import signal
import sys
import time

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
            return float(len(bytearray(64 * 2**30)))
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
        if completion in ("nan", "inf"):
            return float(completion)
        if completion == "text":
            return "1"  # type: ignore[return-value]
        return grade(completion)
