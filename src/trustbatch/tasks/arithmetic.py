"""Arithmetic: an endless supply of small sums such as "12+34=", graded exactly."""

import random
from dataclasses import dataclass
from typing import ClassVar

from trustbatch.types import Prompt

LEVELS = {
    1: ("+", 0, 9, 0, 9),
    2: ("+", 10, 99, 10, 99),
    3: ("+", 100, 999, 100, 999),
    4: ("+-", 10, 99, 10, 99),
    5: ("*", 10, 99, 2, 9),
}
"""level: (operators, lowest and highest first operand, lowest and highest second operand)"""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Sums of a chosen difficulty; the answer must be the number and nothing else."""

    seed: int = 0
    level: int = 2
    name: str = "arithmetic"
    grades_in_process: ClassVar[bool] = True
    """comparing two short texts is cheap"""

    def __post_init__(self) -> None:
        if not isinstance(self.level, int) or self.level not in LEVELS:
            raise ValueError(f"task.level must be one of {', '.join(map(str, LEVELS))}.")

    def prompt(self, index: int) -> Prompt:
        """Return the index-th problem of this seed."""
        rng = random.Random(f"{self.seed}:{self.level}:{index}")
        operators, low, high, second_low, second_high = LEVELS[self.level]
        operator = rng.choice(operators)
        first, second = rng.randint(low, high), rng.randint(second_low, second_high)
        results = {"+": first + second, "-": first - second, "*": first * second}
        return Prompt(
            id=f"arithmetic-{self.level}:{self.seed}:{index}",
            text=f"{first}{operator}{second}=",
            answer=str(results[operator]),
        )

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 for exactly the right number, ignoring surrounding white space; otherwise 0."""
        return float(completion.strip() == prompt.answer)
