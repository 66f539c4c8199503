"""Tasks of one's own, given to runs by the path of this file."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustbatch.tasks import ProblemTask
from trustbatch.types import Prompt, Turn


@dataclass(frozen=True, kw_only=True)
class Short(ProblemTask):
    """Rewards answers of at most as many characters as the problem says: some pass sometimes."""

    name: str = "short"
    template: str | None = "{problem}="
    highest: int = 5

    def rows(self) -> Iterable[Mapping[str, Any]]:
        return [
            {"id": f"{limit}-{number}", "problem": f"{limit}+{number}", "answer": limit}
            for limit in range(self.highest + 1)
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
