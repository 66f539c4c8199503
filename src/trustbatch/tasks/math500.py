"""MATH-500: five hundred problems of the MATH test set."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.problems import ProblemTask


@dataclass(frozen=True, kw_only=True)
class Math500(ProblemTask):
    """500 problems; `difficulty_field = "level"` chooses among levels 1 to 5."""

    hub: ClassVar[HubDataset] = HubDataset("HuggingFaceH4/MATH-500", {"test": "test.jsonl"})

    name: str = "math500"

    def plain(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub calls the id by another name."""
        return {"id": row.get("unique_id"), **row}
