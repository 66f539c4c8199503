"""The work of the step benchmarks: sizes, and prompts with a reward that differs by chance.

Imports no framework: a process holds only the one that it measures.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

SEED = 0
SUMS_LEVEL = 2
"""of the arithmetic task: every prompt has the six characters of "12+34=", so none is padded"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What both frameworks do; everything a worker needs."""

    framework: str
    shape: str
    model: str
    prompts: int
    samples: int
    tokens: int
    prompt_tokens: int
    warm_up: int
    steps: int
    micro_batch_tokens: int
    trl_batch: int
    overrides: tuple[str, ...]
    trl_overrides: tuple[str, ...]
    output: str
    run: str

    @property
    def sequences(self) -> int:
        """Completions in a step."""
        return self.prompts * self.samples

    @property
    def total_steps(self) -> int:
        """Steps run."""
        return self.warm_up + self.steps

    def halved(self) -> "Workload":
        """Return the same work in micro-batches of half the size."""
        return replace(
            self,
            micro_batch_tokens=max(self.micro_batch_tokens // 2, 1),
            trl_batch=max(self.trl_batch // 2, 1),
        )


@dataclass(frozen=True, kw_only=True)
class RandomPrompts:
    """Prompts of random characters, all of one length, and a reward that differs by chance."""

    tokens: int
    vocabulary: int
    name: str = "random_prompts"

    def prompt(self, index: int) -> Any:
        """Return the index-th prompt, with a token per character."""
        # imported here, as everywhere: a process holds one framework
        from trustbatch.types import Prompt

        return Prompt(id=str(index), text=self.text(index), answer="")

    def text(self, index: int) -> str:
        """Return the text of the index-th prompt."""
        # imported here: it imports torch, for which no grading process must wait
        from qwen3_shapes import FIRST_CHARACTER

        numbers = random.Random(f"{SEED}:{index}")
        # half of the vocabulary is far from ASCII and special tokens even in the tiny one
        return "".join(
            chr(FIRST_CHARACTER + numbers.randrange(self.vocabulary // 2))
            for _ in range(self.tokens)
        )

    def grade(self, prompt: Any, completion: str) -> float:
        """Return the share of characters with an even code point."""
        return even_share(completion)


@dataclass(frozen=True, kw_only=True)
class GradedSums:
    """The prompts of Arithmetic with a reward that differs between samples of a random model.

    Completions of a fixed length are never the right number; if all rewards were 0, all gradients
    would be too.
    """

    seed: int = SEED
    level: int = SUMS_LEVEL
    name: str = "graded_sums"

    def prompt(self, index: int) -> Any:
        """Return the index-th sum."""
        from trustbatch.tasks.arithmetic import Arithmetic

        return Arithmetic(seed=self.seed, level=self.level).prompt(index)

    def grade(self, prompt: Any, completion: str) -> float:
        """Return the share of characters with an even code point."""
        return even_share(completion)


def even_share(text: str) -> float:
    """Return the share of characters with an even code point."""
    return sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1)
