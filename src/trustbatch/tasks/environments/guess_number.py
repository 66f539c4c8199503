"""Guess the number: the environment replies "higher" or "lower" until the guess is right."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trustbatch.types import Prompt, Role, Turn

MAX_DIGITS = 9
"""of a guess: Python refuses to parse numbers with thousands of digits"""
INVITATION = (
    "I think of a whole number from 1 to {highest}. Guess it: answer with a number alone. After "
    "each guess I say {higher} or {lower}; you have {guesses} guesses."
)


@dataclass(frozen=True, kw_only=True)
class GuessNumber:
    """Reward 1 for the right number within `guesses`; with bisection, 3 are enough for 1 to 7.

    A policy that ignores the replies can't do better than guesses / highest.
    """

    seed: int = 0
    highest: int = 7
    guesses: int = 3
    higher: str = "higher"
    lower: str = "lower"
    invitation: str = INVITATION
    name: str = "guess_number"

    def __post_init__(self) -> None:
        if self.highest < 1 or self.guesses < 1 or len(str(self.highest)) > MAX_DIGITS:
            raise ValueError("task.highest and task.guesses must be at least 1, and not huge.")

    def prompt(self, index: int) -> Prompt:
        """Return the index-th game; all have the same text."""
        secret = random.Random(f"{self.seed}:{index}").randint(1, self.highest)
        text = self.invitation.format(
            highest=self.highest, guesses=self.guesses, higher=self.higher, lower=self.lower
        )
        return Prompt(id=f"{self.name}:{self.seed}:{index}", text=text, answer=str(secret))

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Reply "higher" or "lower"; end after the last guess or one that is not a number."""
        guess, secret = _number(turns[-1].text), int(prompt.answer)
        num_guesses = sum(turn.role is Role.POLICY for turn in turns)
        if guess is None or guess == secret or num_guesses >= self.guesses:
            return None
        return self.higher if guess < secret else self.lower

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the last guess is right: a right guess always ends the game."""
        return float(_number(completion) == int(prompt.answer))


def _number(text: str) -> int | None:
    """Return the last whole number of a turn; None if there is none, or it is too long."""
    numbers = re.findall(r"[0-9]+", text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= MAX_DIGITS else None
