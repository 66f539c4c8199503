"""GSM8K: grade-school word problems with a number as the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trustbatch.tasks.hub import HubDataset
from trustbatch.tasks.problems import ProblemTask


@dataclass(frozen=True, kw_only=True)
class Gsm8k(ProblemTask):
    """7,473 problems to train on, and 1,319 to evaluate on."""

    hub: ClassVar[HubDataset] = HubDataset(
        "openai/gsm8k", {"train": "main/train-*.parquet", "test": "main/test-*.parquet"}
    )

    name: str = "gsm8k"

    def plain(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub's answers are worked solutions with the number behind ####."""
        if "question" not in row:
            return row
        number = str(row["answer"]).rpartition("####")[2].strip()
        return {**row, "problem": row["question"], "answer": number}
