"""The tasks of an evaluation, each with the problems that every model is asked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.evaluation.settings import digest
from trustbatch.tasks import TASKS, Task, build_task
from trustbatch.tasks.base import ProblemSet
from trustbatch.tasks.file import FILE_ENDINGS
from trustbatch.tasks.hub import NotFetchedError
from trustbatch.types import Prompt

PROBLEM_SEED = 1_000_003
"""tasks without an end take their problems from another seed than a run usually has"""
NUM_ENDLESS = 256
"""problems of a task without an end, unless told"""
DATA_FILES = {
    "amo_bench": "amo_bench_p",
    "countdown": "countdown_test",
    "deepscaler": "deepscaler_preview_31k",
    "gsm8k": "gsm8k_test",
}
"""file of a named task in a folder of data, where it is not the task's own name"""
TEST_SPLITS = {"countdown": "test", "gsm8k": "test"}
"""of hub data whose usual split is for training"""


@dataclass(frozen=True)
class TaskChoice:
    """A task by name or file, with its own options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluatedTask:
    """A task and the problems of it that are asked."""

    name: str
    task: Task
    problems: tuple[Prompt, ...]

    def sampled_prompt(self, problem: Prompt) -> str:
        """Return the id that a problem is sampled under: the prompts of a training have others.

        Theirs end in the number of a sample, this one in a slash; so an evaluation within a run
        shares no random numbers with its rollouts.
        """
        return f"evaluation/{self.name}/{problem.id}/"

    @cached_property
    def digest(self) -> str:
        """Names these very problems, answers included."""
        names = [each.name for each in fields(Prompt)]
        rows = [{name: getattr(problem, name) for name in names} for problem in self.problems]
        return digest(*(json.dumps(row, sort_keys=True, default=str) for row in rows))


def load_suite(
    choices: Sequence[TaskChoice],
    *,
    data: str | None = None,
    limit: int | None = None,
    num_endless: int = NUM_ENDLESS,
) -> list[EvaluatedTask]:
    """Build the tasks; the first `limit` problems of each are asked.

    `data` is a folder with a file of each named task.
    """
    suite: dict[str, EvaluatedTask] = {}
    for choice in choices:
        try:
            task = _build(choice, data)
        except NotFetchedError as error:
            raise ConfigError(
                f"{choice.name!r} can't be evaluated on: {error.what}: name a folder that has its "
                "file with evaluation.data (--data), or go online."
            ) from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{choice.name!r} can't be evaluated on: {error}") from error
        name = _label(choice)
        if name in suite:
            raise ConfigError(f"There are two tasks called {name!r}: evaluate on one at a time.")
        if isinstance(task, ProblemSet):
            problems = tuple(task.problems[:limit])
        else:
            problems = tuple(task.prompt(i) for i in range(min(num_endless, limit or num_endless)))
        suite[name] = EvaluatedTask(name, task, problems)
    return list(suite.values())


def _build(choice: TaskChoice, data: str | None) -> Task:
    name, options = choice.name, dict(choice.options)
    if name.endswith(FILE_ENDINGS):
        return build_task("file", seed=PROBLEM_SEED, path=name, shuffle=False, **options)
    if data is not None and has_data(name):
        file = Path(data) / f"{DATA_FILES.get(name, name)}.jsonl.gz"
        if not file.is_file():
            raise ValueError(f"{file} is not a file: check the folder, or the name of the task.")
        options = {"path": str(file)} | options
    elif name in TEST_SPLITS and "path" not in options:
        options = {"split": TEST_SPLITS[name]} | options
    return build_task(name, seed=PROBLEM_SEED, **options)


def has_data(name: str) -> bool:
    """Whether a task of this name reads a data set that a folder of data can have."""
    return getattr(TASKS.get(name), "hub", None) is not None


def _label(choice: TaskChoice) -> str:
    """Return a short name that can be a part of a folder's."""
    name = Path(choice.name).name.rpartition(":")[2]
    for ending in FILE_ENDINGS:
        name = name.removesuffix(ending)
    return name
