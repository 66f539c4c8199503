"""From the words of the command line to an evaluation."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trustbatch.config import apply_override
from trustbatch.errors import ConfigError
from trustbatch.evaluation.run import Evaluation
from trustbatch.evaluation.settings import SamplingSettings
from trustbatch.evaluation.suite import TaskChoice, load_suite
from trustbatch.rollout import registry
from trustbatch.tasks.file import FILE_ENDINGS

DEFAULT = SamplingSettings()
ENGINE_KEYS = ("rollout.max_sequences", "rollout.precision")
GRADER_KEYS = ("reward.workers", "reward.time_limit", "reward.memory_limit_gib")
SINGLE_KEYS = ENGINE_KEYS + GRADER_KEYS


def requested_evaluation(options: argparse.Namespace, overrides: Sequence[str]) -> Evaluation:
    """Return what `trustbatch eval` is asked to do; the suite's files are read here."""
    tables = _engine_tables(overrides)
    choices = [TaskChoice(name) for name in options.suite]
    if options.task is not None or not choices:
        choices.append(_single_task(options.task or "arithmetic", options.template))
    elif options.template is not None:
        raise ConfigError("--template is for the file of --task: remove it, or name a file.")
    return Evaluation(
        suite=load_suite(
            choices, data=options.data, limit=options.limit, num_endless=options.prompts
        ),
        sampling=SamplingSettings(
            samples=_num_samples(options),
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.max_tokens or DEFAULT.max_tokens,
            seed=options.seed,
        ),
        is_capped=options.max_tokens is None,
        engine=options.engine,
        tables=tables | {"rollout": tables.get("rollout", {}) | {"max_turns": options.max_turns}},
        output=Path(options.output),
    )


def _single_task(name: str, template: str | None) -> TaskChoice:
    if template is None:
        return TaskChoice(name)
    if not name.endswith(FILE_ENDINGS):
        raise ConfigError("--template is for files with problems: remove it, or name a file.")
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
    """Read overrides such as --model.device=cpu; and those of the graders' limits; no others."""
    tree: dict[str, Any] = {}
    engine_tables = [f"rollout.{table}." for table in registry.engine_tables().values()]
    for override in overrides:
        key = override.removeprefix("--").partition("=")[0]
        is_known = key in ENGINE_KEYS + GRADER_KEYS or (
            key.startswith(("model.", *engine_tables)) and key != "model.name"
        )
        if not is_known:
            words = ", ".join(f"--{table}KEY=..." for table in engine_tables)
            raise ConfigError(
                f"{override!r} is no option of eval: beside those of --help it takes "
                f"--model.KEY=..., {words}, --rollout.max_sequences=..., "
                "--rollout.precision=... and --reward.time_limit=... (workers, memory_limit_gib), "
                "as a configuration has them."
            )
        apply_override(tree, override)
    return tree
