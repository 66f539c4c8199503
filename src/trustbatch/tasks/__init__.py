"""Where prompts come from and how completions are graded.

To add a task, write one file with a class that has `name`, `prompt` and `grade`, and register it in
`TASKS`; its keyword arguments are the options of the configuration's [task] table. A task that
reads data is a short `ProblemTask`; see `Gsm8k` in `benchmarks.py` for an example.
"""

from dataclasses import fields
from typing import Any

from trustbatch.errors import did_you_mean
from trustbatch.tasks.arithmetic import Arithmetic
from trustbatch.tasks.base import (
    Environment,
    FilteredTask,
    LearningTask,
    ProblemSet,
    Task,
    check_task,
)
from trustbatch.tasks.benchmarks import (
    Aime24,
    Aime25,
    Aime26,
    Amc23,
    AmoBench,
    Deepscaler,
    FileTask,
    Gsm8k,
    Math500,
)
from trustbatch.tasks.countdown import Countdown
from trustbatch.tasks.curriculum import Curriculum
from trustbatch.tasks.derail import Derail
from trustbatch.tasks.environments.calculator import Calculator
from trustbatch.tasks.environments.guess_number import GuessNumber
from trustbatch.tasks.filters import fit_task, without_overlap
from trustbatch.tasks.mixture import Mixture
from trustbatch.tasks.options import check_options, options_of, refuse_unknown
from trustbatch.tasks.problems import ProblemTask
from trustbatch.utils.imports import load_object

TASKS: dict[str, Any] = {
    "arithmetic": Arithmetic,
    "derail": Derail,
    "file": FileTask,
    "gsm8k": Gsm8k,
    "deepscaler": Deepscaler,
    "math500": Math500,
    "countdown": Countdown,
    "aime24": Aime24,
    "aime25": Aime25,
    "aime26": Aime26,
    "amc23": Amc23,
    "amo_bench": AmoBench,
    "mixture": Mixture,
    "guess_number": GuessNumber,
    "calculator": Calculator,
}


def build_task(name: str, *, seed: int, **options: Any) -> Task:
    """Build a task by name; an unknown name or option is refused with the closest known one."""
    curriculum = options.pop("curriculum", None)
    make = _load_class(name) if ":" in name else TASKS.get(name)
    if make is None:
        raise ValueError(
            f"There is no task {name!r}{did_you_mean(name, TASKS)}; choose one of "
            f"{', '.join(TASKS)}, or name a class as in my_task.py:MyTask."
        )
    if not callable(make):  # an instance rather than a class
        refuse_unknown(options, [], f"task {name}")
        task: Any = make
    else:
        known = options_of(make)
        refuse_unknown(options, [o for o in known if o not in ("seed", "name")], f"task {name}")
        check_options(make, options, f"task {name}", table="task")
        task = make(**({"seed": seed} if "seed" in known else {}), **options)
    if ":" in name:
        check_task(task)
    return task if curriculum is None else _with_curriculum(task, curriculum, seed=seed)


def _load_class(name: str) -> Any:
    try:
        return load_object(name)
    except ImportError as error:
        raise ValueError(f"task.name = {error}") from error


def _with_curriculum(task: Any, options: Any, *, seed: int) -> Curriculum:
    if not isinstance(options, dict):
        raise ValueError("task.curriculum is a table: write {low = 0.1, high = 0.9}.")
    known = [f.name for f in fields(Curriculum) if f.init and f.name not in ("task", "seed")]
    refuse_unknown(options, known, "table task.curriculum")
    check_options(Curriculum, options, "table task.curriculum", table="task.curriculum")
    return Curriculum(task=task, seed=seed, **options)


__all__ = [
    "TASKS",
    "Curriculum",
    "Environment",
    "FilteredTask",
    "LearningTask",
    "Mixture",
    "ProblemSet",
    "ProblemTask",
    "Task",
    "build_task",
    "check_task",
    "fit_task",
    "without_overlap",
]
