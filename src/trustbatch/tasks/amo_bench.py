"""AMO-Bench: Olympiad problems; here those whose answers a program can grade."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.problems import ProblemTask


@dataclass(frozen=True, kw_only=True)
class AmoBench(ProblemTask):
    """39 of the 50 problems: the other answers are descriptions, which need a judge."""

    hub: ClassVar[HubDataset] = HubDataset("meituan-longcat/AMO-Bench", {"test": "*test*"})

    name: str = "amo_bench"

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Return all rows but those with a description for an answer."""
        return (row for row in super().rows() if row.get("answer_type") != "description")

    def plain(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub calls a problem a prompt."""
        if "prompt" not in row:
            return row
        return {**row, "id": row.get("question_id"), "problem": row["prompt"]}

    def details(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return whether the answer is a number, a set or an expression with variables."""
        return {"answer_type": row["answer_type"]} if "answer_type" in row else {}
