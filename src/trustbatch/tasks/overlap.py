"""Problems of training that are also problems of an evaluation: they are left out and counted."""

from collections.abc import Collection, Sequence

from trustbatch.errors import ConfigError
from trustbatch.tasks.base import FilteredTask, Task
from trustbatch.tasks.rows import is_data_file, read_rows

FIELDS = ("problem", "question", "prompt")
"""what a problem is called in data files"""


def statements_of(source: str, *, seed: int) -> Collection[str]:
    """Return the problems of a data file, or of a task by name."""
    if is_data_file(source):
        return [_statement(source, number, row) for number, row in enumerate(read_rows(source))]
    from trustbatch.tasks import build_task

    task = build_task(source, seed=seed)
    if not isinstance(task, FilteredTask):
        raise ValueError(f"task.exclude has {source!r}, which has no end: name files or data sets.")
    return task.statements()


def without_overlap(task: Task, others: Sequence[Task]) -> Task:
    """Return a task to train on without the problems of the tasks that evaluate it."""
    for other in others:
        if isinstance(task, FilteredTask) and isinstance(other, FilteredTask):
            try:
                task = task.without(other.statements(), f"the evaluation {other.name}")
            except ValueError as error:
                raise ConfigError(f"[task] can't be used: {error}") from error
    return task


def _statement(source: str, number: int, row: dict[str, object]) -> str:
    for field in FIELDS:
        if field in row:
            return str(row[field])
    raise ValueError(
        f"Row {number + 1} of {source!r} in task.exclude has no field {', '.join(FIELDS)}: rename "
        "the one with the problem."
    )
