r"""Math data sets to train and evaluate on, from the Hugging Face hub or a local file.

Each is a `ProblemTask` with the location of its data and, if its columns have other names, a
`standard_row` that renames them. All but countdown (`countdown.py`) are graded by `grade_math`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trustbatch.tasks.hub_data import HubDataset
from trustbatch.tasks.problems import ProblemTask


@dataclass(frozen=True, kw_only=True)
class FileTask(ProblemTask):
    r"""Rows of a file, a folder or a data set on the hub with `problem` and `answer` fields.

    A row such as {"id": "aime24-1", "problem": "Find ...", "answer": "204"} becomes a prompt
    through `template`; the answer is the last \boxed{...} of the completion, or else (unless the
    template requires a box) its last number or formula, compared mathematically.
    """

    default_template: ClassVar[str] = "plain"
    drops_duplicates: ClassVar[bool] = False

    name: str = "file"


@dataclass(frozen=True, kw_only=True)
class Gsm8k(ProblemTask):
    """GSM8K: grade-school word problems with a number as the answer; 7,473 train, 1,319 test."""

    hub: ClassVar[HubDataset] = HubDataset(
        "openai/gsm8k", {"train": "main/train-*.parquet", "test": "main/test-*.parquet"}
    )

    name: str = "gsm8k"

    def standard_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub's problem column is `question`; answers end in #### and the number."""
        return {**row, "problem": row["question"]} if "question" in row else row


@dataclass(frozen=True, kw_only=True)
class Deepscaler(ProblemTask):
    """DeepScaleR-Preview: competition problems to train on, from AIME and AMC to Olympiads.

    40,315 problems on the hub; a local file may have a `difficulty` to filter by.
    """

    hub: ClassVar[HubDataset] = HubDataset(
        "agentica-org/DeepScaleR-Preview-Dataset", {"train": "deepscaler.json"}
    )

    name: str = "deepscaler"


@dataclass(frozen=True, kw_only=True)
class Math500(ProblemTask):
    """500 problems of the MATH test set; `columns.difficulty = "level"`: levels 1 to 5."""

    hub: ClassVar[HubDataset] = HubDataset("HuggingFaceH4/MATH-500", {"test": "test.jsonl"})

    name: str = "math500"

    def standard_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub's id column is `unique_id`."""
        return {"id": row.get("unique_id"), **row}


@dataclass(frozen=True, kw_only=True)
class Aime24(ProblemTask):
    """AIME I and II of 2024: thirty problems whose answers are whole numbers from 0 to 999."""

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

    def standard_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub's id column is `problem_idx`."""
        return {"id": row.get("problem_idx"), **row}


@dataclass(frozen=True, kw_only=True)
class Amc23(ProblemTask):
    """AMC 12 of 2023: 40 problems whose answers are whole numbers."""

    hub: ClassVar[HubDataset] = HubDataset("math-ai/amc23", {"test": "test-*.parquet"})

    name: str = "amc23"

    def standard_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub's problem column is `question`."""
        return {**row, "problem": row["question"]} if "question" in row else row


@dataclass(frozen=True, kw_only=True)
class AmoBench(ProblemTask):
    """AMO-Bench: 39 of its 50 Olympiad problems; the answers of the others need a judge."""

    hub: ClassVar[HubDataset] = HubDataset("meituan-longcat/AMO-Bench", {"test": "*test*"})

    name: str = "amo_bench"

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Return all rows except those whose answer is a description."""
        return (row for row in super().rows() if row.get("answer_type") != "description")

    def standard_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hub's problem column is `prompt`."""
        if "prompt" not in row:
            return row
        return {**row, "id": row.get("question_id"), "problem": row["prompt"]}

    def details(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the kind of answer: a number, a set or an expression with variables."""
        return {"answer_type": row["answer_type"]} if "answer_type" in row else {}
