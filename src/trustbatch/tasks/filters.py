"""Leaving out problems: those of an evaluation, those of other data, and bad prompts.

Leaving out evaluation problems keeps training data from contaminating the evaluation.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence

from trustbatch.errors import ConfigError
from trustbatch.tasks.base import FilteredTask, ProblemSet, ReadsDataSets, ReadsFiles, Task
from trustbatch.tasks.columns import read_problem
from trustbatch.tasks.data_source import DataSource, is_data_path
from trustbatch.tasks.rows import BadRow, BadRows, PromptChecks, RowTask
from trustbatch.types import Prompt

PROBLEM_FIELDS = ("problem", "question", "prompt", "messages")
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


def fit_task(task: Task, checks: PromptChecks) -> Task:
    """Return a finite task whose prompts have all been checked; bad ones are refused or left out.

    An endless task is returned as it is.
    """
    try:
        if isinstance(task, FilteredTask):
            return task.fitted(checks)
        if isinstance(task, ProblemSet):
            refuse_bad(task.problems, checks, task)
    except ValueError as error:
        raise ConfigError(f"[task] can't be used: {error}") from error
    return task


def refuse_bad(problems: Sequence[Prompt], checks: PromptChecks, task: Task) -> None:
    """Refuse problems of which one is bad; raises ValueError."""
    needs_answer = checks.needs_answers or getattr(task, "needs_answer", False)
    bad = BadRows()
    for problem, num_tokens in checks.counted(problems, task.name):
        try:
            checks.check(problem, num_tokens, needs_answer=needs_answer)
        except BadRow as reason:
            row = task.row_of(problem) if isinstance(task, RowTask) else None
            bad.add(row.where if row else f"problem {problem.id!r} of {task.name}", reason)
    bad.refuse(has_good=False)  # only the task can leave out a row


def without_overlap(task: Task, others: Sequence[Task]) -> Task:
    """Return a training task without the problems of the tasks that it is evaluated on."""
    for other in others:
        if isinstance(task, FilteredTask) and isinstance(other, FilteredTask):
            try:
                task = task.without(other.statements(), f"the evaluation {other.name}")
            except ValueError as error:
                raise ConfigError(f"[task] can't be used: {error}") from error
    return task


def excluded(source: str, *, seed: int) -> tuple[Collection[str], DataSource]:
    """Return the problems of a data file or of a task by name, and what was read for them."""
    read = DataSource(source)
    if is_data_path(source):
        rows = enumerate(read.rows())
        return [_statement(source, number, row) for number, row in rows], read
    from trustbatch.tasks import build_task  # which imports this module

    task = build_task(source, seed=seed)
    if not isinstance(task, FilteredTask):
        raise ValueError(
            f"task.exclude has {source!r}, which is an endless task: name files or data sets."
        )
    read.files.update(task.files if isinstance(task, ReadsFiles) else {})
    read.digests.update(task.digests if isinstance(task, ReadsDataSets) else {})
    return task.statements(), read


def _statement(source: str, number: int, row: dict[str, object]) -> str:
    for field in PROBLEM_FIELDS:
        if field in row:
            return read_problem(row, {"problem": field}).statement
    raise ValueError(
        f"Row {number + 1} of {source!r} in task.exclude has no field "
        f"{', '.join(PROBLEM_FIELDS)}: rename the one with the problem."
    )
