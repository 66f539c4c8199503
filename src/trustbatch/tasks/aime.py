"""AIME: thirty problems a year whose answers are whole numbers from 0 to 999."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.problems import ProblemTask


@dataclass(frozen=True, kw_only=True)
class Aime24(ProblemTask):
    """AIME I and II of 2024."""

    hub: ClassVar[HubDataset] = HubDataset(
        "HuggingFaceH4/aime_2024", {"test": "data/train-*.parquet"}
    )

    name: str = "aime24"


@dataclass(frozen=True, kw_only=True)
class Aime25(ProblemTask):
    """AIME I and II of 2025."""

    hub: ClassVar[HubDataset] = HubDataset("math-ai/aime25", {"test": "test.jsonl"})

    name: str = "aime25"


@dataclass(frozen=True, kw_only=True)
class Aime26(ProblemTask):
    """AIME I and II of 2026."""

    hub: ClassVar[HubDataset] = HubDataset("MathArena/aime_2026", {"test": "data/train-*.parquet"})

    name: str = "aime26"

    def plain(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub calls the id by another name."""
        return {"id": row.get("problem_idx"), **row}
