"""The tasks of an evaluation, each with its problems."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.tasks import TASKS, Task, build_task
from trustbatch.tasks.base import HELD_OUT_SEED, ProblemSet
from trustbatch.tasks.data_files import ENDINGS
from trustbatch.tasks.data_source import is_data_path
from trustbatch.tasks.hub_data import NotFetchedError
from trustbatch.types import Prompt

NUM_ENDLESS = 256
"""default number of problems of an endless task"""
DATA_FILES = {
    "amo_bench": "amo_bench_p",
    "countdown": "countdown_test",
    "deepscaler": "deepscaler_preview_31k",
    "gsm8k": "gsm8k_test",
}
"""file name of a task in the data folder, if it is not the task's name"""
TEST_SPLITS = {"countdown": "test", "gsm8k": "test"}
"""splits of hub data whose default split is for training"""


@dataclass(frozen=True)
class TaskChoice:
    """A task by name or file, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluatedTask:
    """A task and its evaluated problems."""

    name: str
    task: Task
    problems: tuple[Prompt, ...]

    def sampling_id(self, problem: Prompt) -> str:
        """Return the prompt id that seeds a problem's samples.

        It ends in a slash, unlike the ids of training prompts, so that an evaluation during
        training shares no random numbers with the rollouts.
        """
        return f"evaluation/{self.name}/{problem.id}/"

    @cached_property
    def digest(self) -> str:
        """Hash of the problems and their answers."""
        names = [each.name for each in fields(Prompt)]
        rows = [{name: getattr(problem, name) for name in names} for problem in self.problems]
        for row in rows:
            if not row["history"]:  # the digest of versions without the field
                del row["history"]
        return digest(*(json.dumps(row, sort_keys=True, default=str) for row in rows))


def load_suite(
    choices: Sequence[TaskChoice],
    *,
    data: str | None = None,
    limit: int | None = None,
    num_endless: int = NUM_ENDLESS,
) -> list[EvaluatedTask]:
    """Build the tasks with the first `limit` problems of each.

    `data` is a folder with one file per named task.
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
            raise ConfigError(f"There are two tasks named {name!r}: evaluate on one at a time.")
        if isinstance(task, ProblemSet):
            problems = tuple(task.problems[:limit])
        else:
            problems = tuple(task.prompt(i) for i in range(min(num_endless, limit or num_endless)))
        suite[name] = EvaluatedTask(name, task, problems)
    return list(suite.values())


def _build(choice: TaskChoice, data: str | None) -> Task:
    name, options = choice.name, dict(choice.options)
    if is_data_path(name):
        return build_task("file", seed=HELD_OUT_SEED, path=name, shuffle=False, **options)
    if data is not None and _has_data(name):
        file = Path(data) / f"{DATA_FILES.get(name, name)}.jsonl.gz"
        if not file.is_file():
            raise ValueError(f"{file} is not a file: check the folder, or the name of the task.")
        options = {"path": str(file)} | options
    elif name in TEST_SPLITS and "path" not in options:
        options = {"split": TEST_SPLITS[name]} | options
    return build_task(name, seed=HELD_OUT_SEED, **options)


def _has_data(name: str) -> bool:
    """Whether a task of this name reads a data set."""
    return getattr(TASKS.get(name), "hub", None) is not None


def _label(choice: TaskChoice) -> str:
    """Return a short name that can be used in the name of a folder."""
    name = Path(choice.name).name.rpartition(":")[2]
    for ending in sorted(ENDINGS, key=len, reverse=True):
        name = name.removesuffix(ending)
    return name


def digest(*texts: str) -> str:
    """Return a short hash of texts."""
    found = hashlib.blake2b(digest_size=8)
    for text in texts:
        written = text.encode(errors="surrogatepass")
        found.update(len(written).to_bytes(8, "little") + written)
    return found.hexdigest()
