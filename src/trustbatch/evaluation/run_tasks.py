"""What a run is evaluated on: its held-out problems where it has some, else its own task."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trustbatch.config import Config, load_config
from trustbatch.errors import ConfigError
from trustbatch.evaluation.suite import NUM_ENDLESS, TEST_SPLITS, TaskChoice

CHANGED_BY_TRAINING = ("curriculum", "shuffle")
"""options that decide about the order of training prompts alone"""


@dataclass(frozen=True)
class RunTasks:
    """The tasks of a run, and how long its completions may be."""

    choices: tuple[TaskChoice, ...]
    max_tokens: int
    max_turns: int
    is_held_out: bool
    """whether they are those of [evaluation]; otherwise they are the run's own task"""
    data: str | None = None
    limit: int | None = None
    prompts: int = NUM_ENDLESS


def tasks_of_runs(models: Sequence[str], *, own_task: bool) -> RunTasks:
    """Return the tasks of those models that are runs, or checkpoints of one.

    `own_task` asks for the task that was trained on, also where the run has an [evaluation] table.
    """
    found: RunTasks | None = None
    for model in models:
        config = _run_config(Path(model))
        if config is None:
            continue
        tasks = _tasks_of(config, own_task=own_task)
        if found is not None and tasks.choices != found.choices:
            raise ConfigError(
                "These runs were trained or evaluated on different tasks: name one for all of them "
                "with --task or --suite."
            )
        # the same limits for all models, so that they are comparable
        found = (
            tasks
            if found is None
            else replace(
                found,
                max_tokens=max(found.max_tokens, tasks.max_tokens),
                max_turns=max(found.max_turns, tasks.max_turns),
            )
        )
    if found is None:
        raise ConfigError(
            f"An evaluation needs a task, as {models[0]} is no run that has one: name it with "
            "--task or --suite (in Python: tasks=...)."
        )
    return found


def _run_config(folder: Path) -> Config | None:
    """Return the configuration of a run folder, or of a checkpoint in one."""
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    file = run / "config.toml"
    return load_config(file) if file.is_file() else None


def _tasks_of(config: Config, *, own_task: bool) -> RunTasks:
    table, rollout = config.evaluation, config.rollout
    if table.every and not own_task:
        return RunTasks(
            choices=tuple(TaskChoice(entry.name, entry.options) for entry in table.suite),
            max_tokens=table.max_tokens or rollout.max_tokens,
            max_turns=rollout.max_turns,
            is_held_out=True,
            data=table.data,
            limit=table.limit,
            prompts=table.prompts,
        )
    task = config.task
    options = {k: v for k, v in task.options.items() if k not in CHANGED_BY_TRAINING}
    # a file of problems is called by its name
    name = options.pop("path") if task.name == "file" else task.name
    return RunTasks(
        choices=(TaskChoice(name, options),),
        max_tokens=rollout.max_tokens,
        max_turns=rollout.max_turns,
        is_held_out=task.name in TEST_SPLITS and not options.keys() & {"path", "split"},
    )
