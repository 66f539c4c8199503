"""Making a task fit the model: prompts that are too long are left out where it says so."""

from collections.abc import Callable, Sequence

from trustbatch.errors import ConfigError
from trustbatch.tasks.base import FilteredTask, Task
from trustbatch.types import Prompt


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
