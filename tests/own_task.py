"""Tasks of one's own, given to runs by the path of this file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trustbatch.tasks import ProblemTask
from trustbatch.types import Prompt


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


MADE = Plain(7)
