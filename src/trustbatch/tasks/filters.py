"""Leaving out problems: those of an evaluation, those of other data, and prompts that are too long.

Leaving out evaluation problems keeps training data from contaminating the evaluation.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Sequence

from trustbatch.errors import ConfigError
from trustbatch.tasks.base import FilteredTask, Task
from trustbatch.tasks.data_files import is_data_file, read_rows
from trustbatch.types import Prompt

PROBLEM_FIELDS = ("problem", "question", "prompt")
"""possible names of the problem field in data files"""
_WORD = re.compile(r"\d+|[^\W\d_]+")
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad"
    r"|text|textbf|textit|mathrm|mathbf|operatorname|mbox|begin|end)(?![a-z])"
)
"""LaTeX commands that change the layout of a formula, not its meaning"""
_FRACTION = re.compile(r"\\[dtc]frac(?![a-z])")


def normalized_words(text: str) -> str:
    r"""Return the words and numbers of a text in lower case, without punctuation and layout.

    Two problems with equal normalized words count as the same. Adjacent numbers stay separate:
    [14, 11, 22] is not [14, 11, 2, 2]. Letters and digits are separated, too: "2 x^{3}" equals
    "2x^3", and "\left\{" equals "\{".
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = _LAYOUT.sub(" ", _FRACTION.sub(r"\\frac", plain))
    return " ".join(_WORD.findall(plain))


def fit_task(
    task: Task,
    encode: Callable[[Prompt], Sequence[int]],
    *,
    say: Callable[[str], None] | None = None,
) -> Task:
    """Return a task without prompts of more tokens than it allows."""
    if not isinstance(task, FilteredTask):
        return task
    try:
        return task.fitted(lambda prompt: len(encode(prompt)), say or (lambda _: None))
    except ValueError as error:
        raise ConfigError(f"[task] can't be used: {error}") from error


def without_overlap(task: Task, others: Sequence[Task]) -> Task:
    """Return a training task without the problems of the tasks that it is evaluated on."""
    for other in others:
        if isinstance(task, FilteredTask) and isinstance(other, FilteredTask):
            try:
                task = task.without(other.statements(), f"the evaluation {other.name}")
            except ValueError as error:
                raise ConfigError(f"[task] can't be used: {error}") from error
    return task


def statements_of(source: str, *, seed: int) -> Collection[str]:
    """Return the problems of a data file, or of a task by name."""
    if is_data_file(source):
        return [_statement(source, number, row) for number, row in enumerate(read_rows(source))]
    from trustbatch.tasks import build_task  # which imports this module

    task = build_task(source, seed=seed)
    if not isinstance(task, FilteredTask):
        raise ValueError(
            f"task.exclude has {source!r}, which is an endless task: name files or data sets."
        )
    return task.statements()


def _statement(source: str, number: int, row: dict[str, object]) -> str:
    for field in PROBLEM_FIELDS:
        if field in row:
            return str(row[field])
    raise ValueError(
        f"Row {number + 1} of {source!r} in task.exclude has no field "
        f"{', '.join(PROBLEM_FIELDS)}: rename the one with the problem."
    )
