r"""Problems from a JSONL or Parquet file with `problem` and `answer` fields.

A row such as {"id": "aime24-1", "problem": "Find ...", "answer": "204"} becomes a prompt through
`template`; the answer is looked for in the last \boxed{...} of the completion, else in its last
number or formula, and compared as mathematics (`rewards.math_answers`).
"""

from dataclasses import dataclass
from typing import ClassVar

from trustbatch.rewards.math_answers import grade_math
from trustbatch.tasks.problems import ProblemTask
from trustbatch.types import Prompt


@dataclass(frozen=True, kw_only=True)
class FileTask(ProblemTask):
    """Rows of any file, as they are."""

    usual_template: ClassVar[str] = "plain"
    drops_duplicates: ClassVar[bool] = False

    name: str = "file"

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the row's, see `grade_math`; otherwise 0."""
        return grade_math(completion, prompt.answer)
