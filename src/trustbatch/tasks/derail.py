"""Derail: three digits whose images are to be recited, in a language where a slip is fatal."""

import random
from dataclasses import dataclass
from typing import ClassVar

from trustbatch.tasks.derail_language import ANSWER, DIGITS, EQUALS, NUM_HELD_OUT, the_language
from trustbatch.types import Prompt

SPLITS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class Derail:
    """Prompts such as "3 7 1 =", for the models that `trustbatch.models.derail` makes."""

    seed: int = 0
    split: str = "train"
    """"test" has 200 prompts, in the same order for all seeds, that "train" never has"""
    name: str = "derail"
    grades_in_process: ClassVar[bool] = True
    """comparing a few words needs no other process"""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"task.split must be one of {', '.join(SPLITS)}.")

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt: a random one of those to train on, or the next to test."""
        language = the_language()
        if self.split == "test":
            prompts = language.prompts[-NUM_HELD_OUT:]
            digits = prompts[index % NUM_HELD_OUT]
        else:
            rng = random.Random(f"{self.seed}:{index}")
            digits = rng.choice(language.prompts[:-NUM_HELD_OUT])
        return Prompt(
            id=f"derail-{self.split}:{self.seed}:{index}",
            text=" ".join([*(DIGITS[digit] for digit in digits), EQUALS]),
            answer=" ".join(language.right_digits(digits)),
        )

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 for the right digits in their order, no other, and "answer" as the last word; or 0."""
        words = completion.split()
        written = [word for word in words if word in DIGITS]
        return float(written == prompt.answer.split() and words[-1] == ANSWER)
