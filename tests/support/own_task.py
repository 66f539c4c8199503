"""Tasks of one's own, given to runs as objects or by the path of this file.

A process that grades imports the module of its task: in here that takes a moment, and in a test
that imports torch seconds for each process.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustbatch.tasks import ProblemTask
from trustbatch.tasks.arithmetic import Arithmetic
from trustbatch.types import Prompt, Role, Turn

PROMPTS = ("12+34=", "9=", "55+44=")


@dataclass(frozen=True, kw_only=True)
class Short(ProblemTask):
    """Rewards answers of at most as many characters as the problem says: some pass sometimes."""

    name: str = "short"
    template: str | None = "{problem}="
    lowest: int = 0
    highest: int = 5

    def rows(self) -> Iterable[Mapping[str, Any]]:
        return [
            {"id": f"{limit}-{number}", "problem": f"{limit}+{number}", "answer": limit}
            for limit in range(self.lowest, self.highest + 1)
            for number in range(4)
        ]

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float(len(completion) <= int(prompt.answer))


class Plain:
    """No more than a task must have, and no seed."""

    name = "plain"

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=f"{self.first}+{index}=", answer="")

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float(len(completion) % 2)


class Digits(Plain):
    """Rewards depend on what is written, so that every update moves the weights."""

    name = "digits"

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=f"{index}+1=", answer="")

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float(sum(map(ord, completion)))


class Talk(Plain):
    """An environment that has one more word for all that is said to it."""

    name = "talk"

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        return "1+1+1+1+1+1+1+" if len(turns) < 6 else None


class Slow(Plain):
    """Takes a second for each grade."""

    name = "slow"

    def grade(self, prompt: Prompt, completion: str) -> float:
        time.sleep(1.0)
        return 1.0


class Moody(Plain):
    """Can't grade its first prompt."""

    name = "moody"

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float("nan") if prompt.id == "0" else 0.5


MADE = Plain(7)


class Indifferent(Plain):
    """Rewards every answer alike, so nothing can be learned."""

    name = "indifferent"

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=f"{index % 90 + 10}+{index % 7}=", answer="")

    def grade(self, prompt: Prompt, completion: str) -> float:
        return 1.0


class Unreliable(Arithmetic):
    """Grades nothing in its first batch, and half of the others."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        index = int(prompt.id.rsplit(":", 1)[1])
        if index < 4 or index % 2:
            raise ValueError("no grade today")
        return float(len(completion) % 2)


class Sized(Arithmetic):
    """Rewards an odd number of characters."""

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float(len(completion) % 2)


@dataclass(frozen=True)
class Chatter:
    """Answers with the number of tokens that the policy said, and ends by the conversation."""

    name: str = "chatter"
    most_replies: int = 5

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=PROMPTS[index % len(PROMPTS)], answer="")

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        assert [turn.role for turn in turns[::2]] == [Role.POLICY] * (len(turns) // 2 + 1)
        assert all(turn.role is Role.ENVIRONMENT for turn in turns[1::2])
        said = turns[-1].text
        if len(turns) // 2 >= self.most_replies or len(said) % 3 == 0:
            return None
        return f"{len(said)}+"

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float(len(completion))


class Codes:
    """Completions whose characters have high codes are good ones: rewards differ from the start."""

    name = "codes"

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=f"{10 + index % 7}+{20 + index % 11}=", answer="")

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float(sum(map(ord, completion)))
