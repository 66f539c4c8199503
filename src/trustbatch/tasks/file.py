r"""Problems from a JSONL or Parquet file with `problem` and `answer` fields.

A row such as {"id": "aime24-1", "problem": "Find ...", "answer": "204"} becomes a prompt through
`template`; the answer is looked for in the last \boxed{...} of the completion, else (unless the
template asks for a box) in its last number or formula, and compared as mathematics.
"""

from dataclasses import dataclass
from typing import ClassVar

from trustbatch.tasks.problems import ProblemTask

FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
"""of names that are files with problems, where a task may also be named"""


@dataclass(frozen=True, kw_only=True)
class FileTask(ProblemTask):
    """Rows of any file, as they are."""

    usual_template: ClassVar[str] = "plain"
    drops_duplicates: ClassVar[bool] = False

    name: str = "file"
