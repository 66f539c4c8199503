"""A task whose prompts kill the process that asks for them."""

import os
import signal
from dataclasses import dataclass

from trustbatch.types import Prompt


@dataclass
class Dying:
    """No prompt is ever seen."""

    seed: int = 0
    name: str = "dying"

    def prompt(self, index: int) -> Prompt:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed above")

    def grade(self, prompt: Prompt, completion: str) -> float:
        return 0.0
