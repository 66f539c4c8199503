"""Where prompts come from and how completions are graded.

To add a task, write one file with a class that has `name`, `prompt` and `grade`, and register it in
`TASKS`; its keyword arguments are the options of the configuration's [task] table. A task that
reads data is a short `ProblemTask`; see `Gsm8k` in `benchmarks.py` for an example.
"""

from collections.abc import Mapping
from typing import Any

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
from trustbatch.tasks.environments.gem import Gem
from trustbatch.tasks.environments.guess_number import GuessNumber
from trustbatch.tasks.environments.live import LiveEnvironment
from trustbatch.tasks.filters import fit_task, without_overlap
from trustbatch.tasks.mixture import Mixture
from trustbatch.tasks.problems import ProblemTask
from trustbatch.tasks.reasoning_gym import ReasoningGym
from trustbatch.utils.imports import load_object
from trustbatch.utils.options import check_options, find_entry, option_names, refuse_unknown

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
    "reasoning_gym": ReasoningGym,
    "environment": LiveEnvironment,
    "gem": Gem,
}


GIVEN = ("seed", "name")
"""arguments of a task that are no options: the run has the seed, and the registry the name"""


def build_task(name: str, *, seed: int, **options: Any) -> Task:
    """Build a task by name; an unknown name or option is refused with the closest known one."""
    curriculum = options.pop("curriculum", None)
    make = _load_class(name) if ":" in name else _named(name)
    if not callable(make):  # an instance rather than a class
        refuse_unknown(options, [], f"task {name}")
        task: Any = make
    else:
        check_options(make, options, what=f"task {name}", table="task", hidden=GIVEN)
        seeded = {"seed": seed} if "seed" in option_names(make) else {}
        task = make(**seeded, **options)
        task = getattr(task, "bounded", lambda task=task: task)()
    if ":" in name:
        check_task(task)
    if curriculum is None:
        return task
    _check_curriculum(curriculum)
    return Curriculum(task=task, seed=seed, **curriculum)


def _load_class(name: str) -> Any:
    try:
        return load_object(name)
    except ImportError as error:
        raise ValueError(f"task.name = {error}") from error


def check_task_options(name: str, options: Mapping[str, Any]) -> None:
    """Check the options of a task with a name, without building it."""
    own = {option: value for option, value in options.items() if option != "curriculum"}
    check_options(_named(name), own, what=f"task {name}", table="task", hidden=GIVEN)
    if "curriculum" in options:
        _check_curriculum(options["curriculum"])


def _named(name: str) -> Any:
    return find_entry(TASKS, name, kind="task", also=", or name a class as in my_task.py:MyTask")


def _check_curriculum(options: Any) -> None:
    if not isinstance(options, dict):
        raise ValueError("task.curriculum is a table: write {low = 0.1, high = 0.9}.")
    table = "task.curriculum"
    check_options(Curriculum, options, what=f"table {table}", table=table, hidden=(*GIVEN, "task"))


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
    "check_task_options",
    "fit_task",
    "without_overlap",
]
