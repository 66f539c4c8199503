r"""Problems from a JSONL or Parquet file with `problem` and `answer` fields.

A row such as {"id": "aime24-1", "problem": "Find ...", "answer": "204"} becomes a prompt through
`template`; the answer is looked for in the last \boxed{...} of the completion, else in its last
number or formula, and compared as mathematics (`rewards.math_answers`).
"""

import gzip
import importlib.util
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trustbatch.rewards.math_answers import grade_math
from trustbatch.types import Prompt


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """Rows of a file, shuffled anew in each epoch by the seed."""

    path: str
    seed: int = 0
    template: str = "{problem}"
    problem_field: str = "problem"
    answer_field: str = "answer"
    shuffle: bool = True
    name: str = "file"
    problems: list[Prompt] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if "{problem}" not in self.template:
            raise ValueError("task.template must contain {problem}, where the problem goes.")
        rows: dict[str, Prompt] = {}
        for number, row in enumerate(read_rows(self.path)):
            prompt = self._to_prompt(number, row)
            if prompt.id in rows:  # equal ids would draw equal samples
                prompt = replace(prompt, id=f"{prompt.id}@{number}")
            rows[prompt.id] = prompt
        if not rows:
            raise ValueError(f"task.path = {self.path!r} has no rows: give a file with problems.")
        object.__setattr__(self, "problems", list(rows.values()))

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt of the endless stream; each epoch has its own order."""
        epoch, position = divmod(index, len(self.problems))
        row = self.problems[
            _epoch_order(self.seed, epoch, len(self.problems), self.shuffle)[position]
        ]
        return Prompt(id=f"{row.id}#{epoch}", text=row.text, answer=row.answer)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the row's, see `grade_math`; otherwise 0."""
        return grade_math(completion, prompt.answer)

    def _to_prompt(self, number: int, row: dict[str, Any]) -> Prompt:
        for key in (self.problem_field, self.answer_field):
            if key not in row:
                raise ValueError(
                    f"Row {number + 1} of {self.path!r} has no field {key!r}: it has "
                    f"{', '.join(row)}; set task.problem_field or task.answer_field."
                )
        for key in (self.problem_field, self.answer_field):
            if isinstance(row[key], bool) or not isinstance(row[key], str | int | float):
                raise ValueError(
                    f"Row {number + 1} of {self.path!r} has {key!r} = {row[key]!r}: give text or a "
                    "number."
                )
        return Prompt(
            id=str(number if row.get("id") is None else row["id"]),
            text=self.template.replace("{problem}", str(row[self.problem_field])),
            answer=str(row[self.answer_field]),
        )


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl, .jsonl.gz or .parquet file."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"task.path = {path!r} is not a file: check the path.")
    if file.suffix == ".parquet":
        yield from _read_parquet(file)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        opener = gzip.open if file.suffix == ".gz" else open
        try:
            with opener(file, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _parse_line(line, number, path)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"task.path = {path!r} can't be read: {error}.") from error
    else:
        raise ValueError(f"task.path = {path!r} must end in .jsonl, .jsonl.gz or .parquet.")


def _parse_line(line: str, number: int, path: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"Line {number} of {path!r} is not JSON: {error.msg}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"Line {number} of {path!r} must be a JSON object with named fields.")
    return row


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet files need pyarrow: pip install 'trustbatch[parquet]'.")
    import pyarrow.parquet

    yield from pyarrow.parquet.read_table(file).to_pylist()


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_rows: int, shuffle: bool) -> list[int]:
    order = list(range(num_rows))
    if shuffle:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
