"""Countdown: an expression of given numbers that has a given value."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.problems import ProblemTask
from trustbatch.types import Prompt

NUM_TEST_ROWS = 1024
"""the hub's data has one split: its first rows are for evaluation"""
PROBLEM = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic "
    "arithmetic operations (+, -, *, /) and each number must be used exactly once."
)


@dataclass(frozen=True, kw_only=True)
class Countdown(ProblemTask):
    """Three or four numbers; any expression that uses each of them once is right."""

    hub: ClassVar[HubDataset] = HubDataset(
        "Jiayi-Pan/Countdown-Tasks-3to4",
        {"train": "data/train-*.parquet", "test": "data/train-*.parquet"},
    )

    name: str = "countdown"

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of a file, or those of a split of the hub's data."""
        rows = super().rows()
        if self.path is not None:
            return rows
        if self.split == "test":
            return islice(rows, NUM_TEST_ROWS)
        return islice(rows, NUM_TEST_ROWS, None)

    def plain(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub has numbers and no text, and no expression that would be right."""
        if "nums" not in row or "target" not in row:
            raise ValueError(
                f"A row of countdown has the fields {', '.join(row)}: it needs nums and target."
            )
        problem = PROBLEM.format(numbers=list(row["nums"]), target=row["target"])
        return {"problem": problem, "answer": str(row["target"]), **row}

    def details(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers and the value that an expression of them must have."""
        return {"numbers": [int(number) for number in row["nums"]], "target": int(row["target"])}

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 for an expression that uses each number once and has the value; otherwise 0."""
        from trustbatch.tasks.countdown_grader import grade_countdown

        return grade_countdown(
            completion,
            prompt.details["numbers"],
            prompt.details["target"],
            thinking=bool(self.thinking),
        )
