"""A task that is sent to trainers in other processes, and what it would leave behind."""

import io
from pickle import PicklingError
from typing import Any

from ray.cloudpickle.cloudpickle import Pickler

from trustbatch.errors import ConfigError
from trustbatch.tasks import Task
from trustbatch.tasks.problems import ProblemTask


def refuse_unsendable(task: Task) -> None:
    """Refuse a task that would arrive without its problems, or not at all."""
    found = _Findings(io.BytesIO())
    try:
        found.dump(task)
    except (TypeError, PicklingError) as error:
        raise ConfigError(
            f"The task {task.name!r} can't be sent to other trainers ({error}): give it as a "
            "table, or set cluster.trainers to 1."
        ) from error
    if found.problem_task is not None:
        raise ConfigError(
            f"The task {found.problem_task!r} leaves its problems behind when it is sent to other "
            'trainers: give it as a table, such as task={"name": "file", "path": ...}.'
        )


class _Findings(Pickler):
    """Goes through a task as Ray will, into whatever holds another task."""

    problem_task: str | None = None

    def persistent_id(self, value: Any) -> None:
        """Note a task with problems on the way; pickle asks this of every object."""
        if isinstance(value, ProblemTask):
            self.problem_task = value.name
