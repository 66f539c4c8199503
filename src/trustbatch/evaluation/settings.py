"""Settings of an evaluation: what determines its samples, and how the command line sets them."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trustbatch.config import apply_override
from trustbatch.errors import ConfigError
from trustbatch.evaluation.run_tasks import RunTasks, tasks_of_runs
from trustbatch.evaluation.suite import EvaluatedTask, TaskChoice, digest, load_suite
from trustbatch.rollout.config import MAX_TURNS
from trustbatch.rollout.registry import DEFAULT_ENGINE, engine_tables
from trustbatch.tasks.base import ProblemSet, is_environment
from trustbatch.tasks.data_source import is_data_path
from trustbatch.types import SamplingParams
from trustbatch.utils.terminal import LiveLine

if TYPE_CHECKING:
    from trustbatch.models.policy import Policy
    from trustbatch.rollout.config import RolloutConfig

ENGINE_KEYS = ("rollout.max_sequences", "rollout.precision")
GRADER_KEYS = (
    "reward.workers",
    "reward.time_limit",
    "reward.memory_limit_gib",
    "reward.environment",
)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Number of samples per problem and sampling parameters; defaults are the paper's."""

    samples: int = 16
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 4096
    seed: int = 0

    def params(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return the engine's sampling parameters."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop_token_ids=stop_token_ids,
            temperature=self.temperature,
            top_p=self.top_p,
        )


DEFAULT = SamplingSettings()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, and how; the same for every model."""

    suite: Sequence[EvaluatedTask]
    sampling: SamplingSettings
    is_capped: bool = True
    """whether max_tokens is lowered to fit the model's context; otherwise it is refused"""
    engine: str = DEFAULT_ENGINE
    tables: Mapping[str, Any] = field(default_factory=dict)
    """keys of [model], [rollout] and [reward], for engine and graders"""
    output: Path = Path("evals")


def recorded_settings(
    sampling: SamplingSettings,
    suite: Sequence[EvaluatedTask],
    rollout: "RolloutConfig",
    policy: "Policy",
    *,
    max_sequences: int,
) -> dict[str, Any]:
    """Return the settings that are saved with the results, as plain values.

    `max_sequences` is one of them: it determines which problems are sampled together, and so how
    their logits are rounded.
    """
    is_auto = rollout.precision == "auto"
    template = policy.tokenizer.chat_template
    return {
        **asdict(sampling),
        "tasks": {
            task.name: {"problems": len(task.problems), "digest": task.digest} for task in suite
        },
        # only environments have a second turn
        "max_turns": rollout.max_turns
        if any(is_environment(each.task) for each in suite)
        else None,
        "chat_template": None if not template else digest(str(template)),
        "engine": rollout.engine,
        "precision": policy.precision if is_auto else rollout.precision,
        "max_sequences": max_sequences,
    }


def requested_evaluation(options: argparse.Namespace, overrides: Sequence[str]) -> Evaluation:
    """Return the evaluation that the command line requests; reads the files of the suite."""
    task_keys = [each for each in overrides if each.startswith("--task.")]
    tables = _engine_tables([each for each in overrides if each not in task_keys])
    task_options = _task_options(task_keys)
    tasks = _requested_tasks(options, task_options)
    suite = load_suite(
        tasks.choices,
        data=options.data or tasks.data,
        limit=options.limit or tasks.limit,
        num_endless=options.prompts or tasks.prompts,
    )
    if not tasks.is_held_out and any(isinstance(each.task, ProblemSet) for each in suite):
        LiveLine().warn(
            "These are the problems that the run was trained on: name others with --task or "
            "--suite to see how good it is on new ones."
        )
    turns = {"max_turns": options.max_turns or tasks.max_turns}
    return Evaluation(
        suite=suite,
        sampling=SamplingSettings(
            samples=_num_samples(options),
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.max_tokens or tasks.max_tokens,
            seed=options.seed,
        ),
        is_capped=options.max_tokens is None,
        engine=options.engine,
        tables=tables | {"rollout": tables.get("rollout", {}) | turns},
        output=Path(options.output),
    )


def _requested_tasks(options: argparse.Namespace, task_options: Mapping[str, Any]) -> RunTasks:
    """Return the tasks that the command line names, else those of the runs."""
    if options.task is None and not options.suite:
        own = tasks_of_runs(options.models, own_task=bool(task_options or options.template))
        if not task_options and options.template is None:
            return own
        (task,) = own.choices
        template = {} if options.template is None else {"template": options.template}
        return replace(own, choices=(_with_options(task, {**template, **task_options}),))
    choices = [TaskChoice(name) for name in options.suite]
    if options.task is not None:
        task = _single_task(options.task, options.template)
        choices.append(_with_options(task, task_options))
    elif options.template is not None:
        raise ConfigError("--template requires a file in --task: remove it, or name a file.")
    elif task_options:
        raise ConfigError(
            f"--task.{next(iter(task_options))} is an option of one task: name it with --task, "
            "not in --suite."
        )
    return RunTasks(
        tuple(choices), max_tokens=DEFAULT.max_tokens, max_turns=MAX_TURNS, is_held_out=True
    )


def _task_options(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse --task.KEY=value."""
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    options = tree.get("task", {})
    if "name" in options:
        raise ConfigError(f"--task.name is --task here: write --task {options['name']}.")
    return options


def _with_options(task: TaskChoice, options: Mapping[str, Any]) -> TaskChoice:
    return TaskChoice(task.name, {**task.options, **options})


def _single_task(name: str, template: str | None) -> TaskChoice:
    if template is None:
        return TaskChoice(name)
    if not is_data_path(name):
        raise ConfigError("--template requires a file with problems: remove it, or name a file.")
    return TaskChoice(name, {"template": template})


def _num_samples(options: argparse.Namespace) -> int:
    if options.temperature > 0:
        return options.samples or DEFAULT.samples
    if options.samples not in (None, 1):
        raise ConfigError(
            "--temperature 0 gives the same completion every time: set --samples 1, or raise the "
            "temperature."
        )
    return 1


def _engine_tables(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse overrides of engine and graders such as --model.device=cpu; refuse any other."""
    tree: dict[str, Any] = {}
    own_tables = [f"rollout.{table}." for table in engine_tables().values()]
    for override in overrides:
        key = override.removeprefix("--").partition("=")[0]
        is_known = key in ENGINE_KEYS + GRADER_KEYS or (
            key.startswith(("model.", *own_tables)) and key != "model.name"
        )
        if not is_known:
            words = ", ".join(f"--{table}KEY=..." for table in own_tables)
            raise ConfigError(
                f"{override!r} is not an option of eval: in addition to those of --help it takes "
                f"--task.KEY=..., --model.KEY=..., {words}, --rollout.max_sequences=..., "
                "--rollout.precision=... and --reward.time_limit=... (workers, memory_limit_gib, "
                "environment), as in a configuration."
            )
        apply_override(tree, override)
    return tree
