"""AMC 12 of 2023: problems whose answers are whole numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.problems import ProblemTask


@dataclass(frozen=True, kw_only=True)
class Amc23(ProblemTask):
    """40 problems."""

    hub: ClassVar[HubDataset] = HubDataset("math-ai/amc23", {"test": "test-*.parquet"})

    name: str = "amc23"

    def plain(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub calls a problem a question."""
        return {**row, "problem": row["question"]} if "question" in row else row
