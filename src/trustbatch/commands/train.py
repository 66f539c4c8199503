"""`trustbatch train`: a run, or with --dry-run its plan."""

import argparse
import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from trustbatch.commands.base import Commands, add_command
from trustbatch.errors import ConfigError
from trustbatch.rollout.registry import engine_info
from trustbatch.utils.arguments import at_least_one, gib
from trustbatch.utils.terminal import is_quiet

if TYPE_CHECKING:
    from trustbatch.config import Config
    from trustbatch.evaluation.suite import EvaluatedTask
    from trustbatch.tasks import Task


def add_train(commands: Commands) -> None:
    """Add the command and its arguments."""
    train = add_command(
        commands,
        "train",
        _train_or_plan,
        shows_progress=True,
        takes_keys=True,
        help="train a model as configured in a TOML file",
        epilog="Any key can be set on the command line: --training.steps=10 --objective.name=grpo",
    )
    train.add_argument("config", help="TOML file; see configs/")
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan"
    )
    train.add_argument(
        "--gpus",
        type=at_least_one,
        help="with --dry-run: number of GPUs to plan for; default: those of this machine",
    )
    train.add_argument(
        "--gpu-memory", type=gib, metavar="GIB", help="with --dry-run: memory of each GPU"
    )


def _train_or_plan(options: argparse.Namespace) -> int:
    return _dry_run(options) if options.dry_run else _train(options)


def _train(options: argparse.Namespace) -> int:
    from trustbatch.api import train_config
    from trustbatch.config import load_config
    from trustbatch.observe.report import write_report
    from trustbatch.utils.signals import StopSignals

    if options.gpus is not None or options.gpu_memory is not None:
        raise ConfigError(
            "--gpus and --gpu-memory are for --dry-run: remove them, and start a run on several "
            "GPUs with torchrun."
        )
    console = Console(soft_wrap=True)
    config = load_config(options.config, options.overrides)
    with StopSignals() as signals:
        result = train_config(config, is_asked_to_stop=signals.is_asked)
    if int(os.environ.get("RANK", "0")) > 0:
        return 0  # under torchrun rank 0 prints
    report = write_report([result.folder], result.folder / "report.html")
    if config.run.keep_checkpoints:
        console.print(f"Model   {result.checkpoint}", markup=False, highlight=False)
    if not is_quiet():
        console.print(f"Report  {report}", markup=False, highlight=False)
    step = result.metrics[-1]["step"]
    if signals.received is None or step == config.training.steps:
        return 0
    again = "continues the run" if config.run.keep_checkpoints else "starts over"
    console.print(f"Stopped after step {step}: the same command {again}.")
    return 128 + signals.received


def _dry_run(options: argparse.Namespace) -> int:
    from trustbatch.build.data import checked_task
    from trustbatch.build.session import configured_task
    from trustbatch.config import load_config
    from trustbatch.evaluation.in_training import configured_suite
    from trustbatch.observe.trackers import require_packages
    from trustbatch.plan import describe_plan
    from trustbatch.plan.hardware import find_hardware, has_gpu
    from trustbatch.plan.memory import GIB
    from trustbatch.plan.token_counts import prompt_tokenizer
    from trustbatch.rewards import Scorer
    from trustbatch.tasks import without_overlap
    from trustbatch.utils.terminal import LiveLine

    if int(os.environ.get("RANK", "0")) > 0:
        return 0  # under torchrun rank 0 prints
    config = load_config(options.config, options.overrides)
    suite = configured_suite(config.evaluation)
    task = without_overlap(configured_task(config), [each.task for each in suite])
    is_elsewhere = options.gpus is not None or options.gpu_memory is not None
    if options.gpus is not None and options.gpu_memory is None and not has_gpu(config):
        raise ConfigError(
            f"--gpus {options.gpus} needs --gpu-memory, such as 80: there is no GPU here."
        )
    if (tokenizer := prompt_tokenizer(config)) is not None:
        task = checked_task(
            config,
            task,
            suite,
            count_tokens=tokenizer.count_tokens,
            context_length=tokenizer.context_length,
            say=LiveLine().show,
        )
    if not is_elsewhere:
        engine_info(config.rollout.engine).require()
        require_packages(config.run.trackers)
    _check_resumable(config, task, suite, is_fitted=tokenizer is not None)
    if config.reward.terms:
        scorer = Scorer(task, config.reward, max_tokens=config.rollout.max_tokens)
        with contextlib.closing(scorer):
            scorer.prepare()  # imports the reward functions
    memory = None if options.gpu_memory is None else options.gpu_memory * GIB
    hardware = find_hardware(config, num_gpus=options.gpus, gpu_memory=memory)
    console = Console(soft_wrap=True)
    console.print(config.to_toml(), markup=False, highlight=False)
    console.print(describe_plan(config, task, hardware=hardware), markup=False, highlight=False)
    if suite:
        sizes = ", ".join(f"{each.name} ({len(each.problems):,} problems)" for each in suite)
        line = f"Evaluated every {config.evaluation.every} steps on {sizes}."
        console.print(line, markup=False, highlight=False)
    return 0


def _check_resumable(
    config: "Config", task: "Task", suite: "list[EvaluatedTask]", *, is_fitted: bool
) -> None:
    """Refuse what a start of the run would refuse."""
    from trustbatch.build.fingerprints import (
        fingerprint_files,
        fingerprint_prompts,
        refuse_changed_files,
        refuse_changed_prompts,
    )
    from trustbatch.checkpoints.load import list_checkpoints
    from trustbatch.config.resume import check_resumable
    from trustbatch.observe.run_folder import RunFolder
    from trustbatch.utils.terminal import LiveLine

    run = RunFolder(config.run, config.to_toml())
    check_resumable(config, run)
    newest = next(reversed(list_checkpoints(run.checkpoints)), None)
    say = partial(LiveLine().show, last=True)
    files = fingerprint_files(config, task, suite)
    refuse_changed_files(config, newest, files, say)
    if is_fitted:
        refuse_changed_prompts(config, newest, fingerprint_prompts(files, task), say)
