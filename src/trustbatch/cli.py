"""The command line: parse, build, call."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.table import Table

from trustbatch import __version__
from trustbatch.doctor.rollouts.command import add_rollouts_arguments, rollouts_command
from trustbatch.errors import ConfigError, TrustbatchError
from trustbatch.inspection.command import add_inspect, inspect_command
from trustbatch.rollout.registry import DEFAULT_ENGINE, engine_info, engine_names
from trustbatch.studies.command import add_study_arguments
from trustbatch.utils.arguments import (
    at_least_one,
    gib,
    names,
    not_negative,
    port,
    probability,
)
from trustbatch.utils.system_errors import explain
from trustbatch.utils.terminal import plain_line

if TYPE_CHECKING:
    from trustbatch.config import Config
    from trustbatch.evaluation.suite import EvaluatedTask
    from trustbatch.tasks import Task

SECONDS_FOR_RANK_ZERO = 20.0
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an error a user can act on is printed without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        again = " The same command continues from the last checkpoint." if "train" in words else ""
        Console(stderr=True).print(f"\nStopped.{again}")
        return 130
    except _errors_of_the_machine() as error:
        sentence = None if isinstance(error, TrustbatchError) else explain(error)
        if sentence is None and not isinstance(error, TrustbatchError | OSError):
            raise
        rank = os.environ.get("RANK", "0")
        if isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0":
            # every process of a machine finds the same and the first one says so, unless another
            # one ends before it: then torchrun ends all of them
            time.sleep(SECONDS_FOR_RANK_ZERO)
            return 2
        who = f"rank {rank}: " if rank != "0" else ""
        Console(stderr=True, soft_wrap=True).print(
            f"{who}error: {_printable(sentence or str(error))}", markup=False, style="red"
        )
        return 2


def _errors_of_the_machine() -> tuple[type[Exception], ...]:
    """Return our own errors, and those that may say that a disk or the memory is full."""
    # not imported here: there may be no memory or file handle left for it
    library = sys.modules.get("safetensors")
    others = () if library is None else (library.SafetensorError,)
    return TrustbatchError, OSError, MemoryError, RuntimeError, ImportError, *others


def _printable(message: str) -> str:
    """Return a message whose quotations, such as a completion, can't control the terminal."""
    return "\n".join(plain_line(line) for line in message.split("\n"))


def _run(arguments: list[str]) -> int:
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if options.command not in ("train", "doctor", "eval") and overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    # each command imports what it needs: --help answers at once
    if options.command == "train":
        return _dry_run(options, overrides) if options.dry_run else _train(options, overrides)
    if options.command == "doctor":
        return _doctor(options, overrides)
    if options.command == "inspect":
        return inspect_command(options)
    if options.command == "report":
        return _report(options.runs, options.output)
    if options.command == "status":
        return _status(Path(options.run), watch=options.watch)
    if options.command == "dashboard":
        return _dashboard(Path(options.folder), options.port)
    if options.command == "eval":
        return _eval(options, overrides)
    if options.command == "compare":
        return _compare(options.evaluations, options.k, options.output)
    if options.command == "study":
        from trustbatch.studies.command import study_command

        return study_command(options, arguments)
    return _quickstart(Path(options.folder), steps=options.steps, seed=options.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trustbatch", description="RL on language models with measured trust in each batch."
    )
    parser.add_argument("--version", action="version", version=f"trustbatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands)
    _add_doctor(commands)
    add_inspect(commands)
    _add_pages_and_status(commands)
    _add_eval(commands)
    _add_compare(commands)
    study = commands.add_parser(
        "study",
        help="compare objectives as the paper does, at several scales",
        epilog="The same command continues where it was stopped. Exit status 1: a run has failed.",
    )
    add_study_arguments(study)
    quickstart = commands.add_parser(
        "quickstart", help="a few minutes on a CPU: tiny model, P3O beside GRPO, report"
    )
    quickstart.add_argument("--folder", default="runs/quickstart", help="where results go")
    quickstart.add_argument("--steps", type=at_least_one, default=60, help="of each run")
    quickstart.add_argument("--seed", type=int, default=0, help="of the model and all runs")
    return parser


def _add_train(commands: Commands) -> None:
    train = commands.add_parser(
        "train",
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


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="is this stack on-policy? names what is not",
        epilog="Exit status 0: on-policy, 1: off-policy. Any key can be set: "
        "--rollout.temperature=0.6",
    )
    doctor.add_argument(
        "config", nargs="?", help="TOML file, as for train; nothing is trained or written"
    )
    doctor.add_argument(
        "--tokens",
        type=at_least_one,
        default=2048,
        help="tokens to sample and recompute; default: 2048",
    )
    doctor.add_argument("--json", help="file for everything that was measured")
    add_rollouts_arguments(doctor)


def _add_pages_and_status(commands: Commands) -> None:
    report = commands.add_parser("report", help="write one HTML page about some runs")
    report.add_argument("runs", nargs="+", help="run folders, e.g. runs/a runs/b")
    report.add_argument(
        "--output",
        help="the HTML file; default: report.html in a run's folder, report-A-B.html beside two",
    )
    status = commands.add_parser(
        "status",
        help="how a run is doing, from another terminal",
        epilog="Exit status 0: running or finished; 1: stopped, failed or dead; 2: no run found.",
    )
    status.add_argument("run", help="run folder, e.g. runs/a")
    status.add_argument("--watch", action="store_true", help="keep showing it until it ends")
    dashboard = commands.add_parser("dashboard", help="a live page about all runs of a folder")
    dashboard.add_argument("folder", nargs="?", default="runs", help="default: runs")
    dashboard.add_argument(
        "--port", type=port, default=0, help="of 127.0.0.1; default: one that is free"
    )


def _add_eval(commands: Commands) -> None:
    evaluation = commands.add_parser(
        "eval",
        help="pass@k of models on tasks, with intervals",
        epilog="The same command continues where it was stopped. Keys of an engine can be set: "
        "--model.device=cpu --rollout.max_sequences=64 --rollout.vllm.kv_cache_gib=4",
    )
    evaluation.add_argument(
        "models", nargs="+", help="run, checkpoint, folder, .gguf file, smollm2, or hub name"
    )
    evaluation.add_argument("--suite", type=names, default=[], help="tasks: aime24,amc23")
    evaluation.add_argument("--task", help="one task, or a .jsonl/.parquet; default: arithmetic")
    evaluation.add_argument("--data", help="folder with NAME.jsonl.gz of each named task")
    evaluation.add_argument(
        "--template", help="the prompt; {problem} is replaced (for the file of --task only)"
    )
    evaluation.add_argument("--engine", choices=engine_names(), default=DEFAULT_ENGINE)
    evaluation.add_argument(
        "--samples", type=at_least_one, help="per problem; default: 16, at temperature 0: 1"
    )
    evaluation.add_argument("--temperature", type=not_negative, default=1.0, help="0 is greedy")
    evaluation.add_argument("--top-p", type=probability, default=0.95, help="default: 0.95")
    evaluation.add_argument(
        "--max-tokens", type=at_least_one, help="default: 4096, or what the context allows"
    )
    evaluation.add_argument(
        "--max-turns", type=at_least_one, default=8, help="of an environment; default: 8"
    )
    evaluation.add_argument("--limit", type=at_least_one, help="first problems of each task")
    evaluation.add_argument(
        "--prompts", type=at_least_one, default=256, help="of an endless task; default: 256"
    )
    evaluation.add_argument("--seed", type=int, default=0, help="of the samples")
    evaluation.add_argument("--output", default="evals", help="where the results' folders go")


def _add_compare(commands: Commands) -> None:
    comparison = commands.add_parser("compare", help="which of two evaluated models is better")
    comparison.add_argument("evaluations", nargs=2, help="folders that eval made, e.g. evals/a")
    comparison.add_argument("--k", type=at_least_one, default=1, help="of pass@k; default: 1")
    comparison.add_argument("--output", help="folder for comparison.json, .md and the plot")


def _dry_run(options: argparse.Namespace, overrides: list[str]) -> int:
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
    config = load_config(options.config, overrides)
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


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
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
    config = load_config(options.config, overrides)
    with StopSignals() as signals:
        result = train_config(config, is_asked_to_stop=signals.is_asked)
    if int(os.environ.get("RANK", "0")) > 0:
        return 0  # under torchrun rank 0 prints
    report = write_report([result.folder], result.folder / "report.html")
    console.print(f"Model   {result.checkpoint}", markup=False, highlight=False)
    console.print(f"Report  {report}", markup=False, highlight=False)
    step = result.metrics[-1]["step"]
    if signals.received is None or step == config.training.steps:
        return 0
    console.print(f"Stopped after step {step}: the same command continues the run.")
    return 128 + signals.received


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    from trustbatch.build.data import checked_task
    from trustbatch.build.engines import build_engine, load_second_policies
    from trustbatch.build.policies import load_policy
    from trustbatch.build.session import configured_task
    from trustbatch.config import load_config
    from trustbatch.doctor.examine import examine
    from trustbatch.doctor.verdict import judge, show, to_record
    from trustbatch.utils.terminal import LiveLine

    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json} has no folder to be written to: make it first.")
    if options.rollouts is not None:
        return rollouts_command(options, overrides)
    if options.config is None:
        raise ConfigError("Give the doctor a configuration, or --rollouts FILE and --model MODEL.")
    config = load_config(options.config, overrides)
    task = configured_task(config)
    line = LiveLine()
    line.show(f"loading {config.model.name}")
    policy = load_policy(config)
    task = checked_task(
        config,
        task,
        [],
        count_tokens=policy.count_tokens,
        context_length=policy.context_length,
        say=line.show,
    )
    load_second_policies(config, policy)  # refuses what a run would refuse
    engine = build_engine(config, policy)
    try:
        examination = examine(
            config, policy, engine, task, num_tokens=options.tokens, say=line.show
        )
    finally:
        engine.close()
    line.show("examined", last=True)
    verdict = judge(examination, config)
    show(Console(soft_wrap=True), examination, verdict)
    if options.json:
        record = to_record(examination, verdict)
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if verdict.is_on_policy else 1


def _report(runs: list[str], output: str | None) -> int:
    from trustbatch.observe.report import default_output, write_report

    folders = [Path(run) for run in runs]
    written = write_report(folders, Path(output) if output else default_output(folders))
    Console(soft_wrap=True).print(str(written), markup=False, highlight=False)
    return 0


def _status(folder: Path, *, watch: bool) -> int:
    from trustbatch.observe.status_view import show_status, watch_status

    show = watch_status if watch else show_status
    return show(Console(highlight=False), folder).exit_code


def _dashboard(folder: Path, port: int) -> int:
    from trustbatch.observe.dashboard import serve

    console = Console(soft_wrap=True, highlight=False)
    serve(folder, port, lambda line: console.print(line, markup=False))
    return 0


def _eval(options: argparse.Namespace, overrides: list[str]) -> int:
    from trustbatch.build.engines import build_engine
    from trustbatch.build.policies import load_model
    from trustbatch.evaluation.comparison import compare
    from trustbatch.evaluation.report import comparison_table, results_table
    from trustbatch.evaluation.run import ModelEvaluator
    from trustbatch.evaluation.settings import requested_evaluation

    evaluator = ModelEvaluator(load_model=load_model, open_engine=build_engine)
    evaluation = requested_evaluation(options, overrides)
    baseline, *others = evaluator.evaluate_models(options.models, evaluation)
    console = Console(soft_wrap=True)
    for each in (baseline, *others):
        console.print(results_table(each.results), markup=False, highlight=False)
    for other in others:
        table = comparison_table(compare(baseline.results, other.results))
        console.print(table, markup=False, highlight=False)
    for each in (baseline, *others):
        console.print(f"Results  {each.folder}", markup=False, highlight=False)
    return 0


def _compare(folders: list[str], k: int, output: str | None) -> int:
    from trustbatch.evaluation.comparison import compare
    from trustbatch.evaluation.report import comparison_table, pass_at_k_page
    from trustbatch.evaluation.results import read_results
    from trustbatch.observe.page_parts import as_bytes

    first, second = (read_results(Path(folder)) for folder in folders)
    comparison = compare(first, second, k=k)
    table = comparison_table(comparison)
    Console(soft_wrap=True).print(table, markup=False, highlight=False)
    if output is not None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps(comparison.to_dict(), indent=2) + "\n"
        (folder / "comparison.json").write_text(record, encoding="utf-8")
        (folder / "comparison.md").write_text(table, encoding="utf-8")
        page = pass_at_k_page([first, second])
        (folder / "pass_at_k.html").write_bytes(as_bytes(page))
    return 0


def _quickstart(folder: Path, *, steps: int, seed: int) -> int:
    from trustbatch.quickstart import EXPLANATION, HEADINGS, NUM_WORDS, quickstart

    console = Console(soft_wrap=True)
    result = quickstart(
        folder, steps=steps, seed=seed, say=lambda line: console.print(line, highlight=False)
    )
    table = Table(title=result.title)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place < NUM_WORDS else "right")
    for row in result.rows:
        table.add_row(*row.cells)
    console.print(table)
    console.print(EXPLANATION, highlight=False)
    console.print(f"Report  {result.report}", highlight=False)
    return 0
