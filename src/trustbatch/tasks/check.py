"""Whether an object is a task: said before a run starts, not after its first batch."""

import inspect
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.types import Prompt


def check_task(task: Any) -> None:
    """Refuse what a run could not use as a task."""
    if inspect.isclass(task):
        raise ConfigError(
            f"The class {task.__name__} is no task yet: make one of it, {task.__name__}(...)."
        )
    kind = type(task).__name__
    if not isinstance(getattr(task, "name", None), str) or not task.name:
        raise ConfigError(f"The task {kind} has no name: give it a text `name`.")
    for method in ("prompt", "grade"):
        if not callable(getattr(task, method, None)):
            raise ConfigError(
                f"The task {kind} has no method {method!r}: a task has `name`, `prompt(index)` and "
                "`grade(prompt, completion)`."
            )
    prompt = task.prompt(0)
    if not isinstance(prompt, Prompt):
        raise ConfigError(
            f"prompt(0) of the task {task.name} is {prompt!r}: return a trustbatch.types.Prompt."
        )
    if not isinstance(prompt.id, str) or not prompt.id:
        raise ConfigError(
            f"prompt(0) of the task {task.name} has the id {prompt.id!r}: give each prompt a text "
            "of its own as its id."
        )
