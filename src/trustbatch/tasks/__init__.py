"""Where prompts come from and how answers are graded.

To add a task, write one file with a class that has `name`, `prompt` and `grade`, and name it in
`TASKS`; its keyword arguments are the options of the configuration's [task] table.
"""

from dataclasses import fields
from typing import Any

from trustbatch.environments.calculator import Calculator
from trustbatch.environments.guess_number import GuessNumber
from trustbatch.errors import did_you_mean
from trustbatch.tasks.arithmetic import Arithmetic
from trustbatch.tasks.base import Task
from trustbatch.tasks.file import FileTask

TASKS: dict[str, type[Any]] = {
    "arithmetic": Arithmetic,
    "file": FileTask,
    "guess_number": GuessNumber,
    "calculator": Calculator,
}


def build_task(name: str, *, seed: int, **options: Any) -> Task:
    """Build a task by name; a wrong name or option is refused with the nearest right one."""
    if name not in TASKS:
        raise ValueError(
            f"There is no task {name!r}{did_you_mean(name, TASKS)}; choose one of "
            f"{', '.join(TASKS)}."
        )
    known = [f.name for f in fields(TASKS[name]) if f.init and f.name not in ("seed", "name")]
    for option in options:
        if option not in known:
            raise ValueError(
                f"The task {name} has no option {option!r}{did_you_mean(option, known)}; its "
                f"options are {', '.join(known)}."
            )
    if name == "file" and "path" not in options:
        raise ValueError("The task file needs task.path, a .jsonl or .parquet file.")
    return TASKS[name](seed=seed, **options)


__all__ = ["TASKS", "Task", "build_task"]
