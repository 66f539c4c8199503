"""`trustbatch eval` and `compare`: how good models are."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from trustbatch.commands.base import Commands, add_command
from trustbatch.rollout.registry import DEFAULT_ENGINE, engine_names
from trustbatch.utils.arguments import at_least_one, names, not_negative, probability
from trustbatch.utils.terminal import is_quiet


def add_eval(commands: Commands) -> None:
    """Add the command and its arguments."""
    evaluation = add_command(
        commands,
        "eval",
        _eval,
        shows_progress=True,
        takes_keys=True,
        help="mean reward and pass@k of models on tasks, with intervals",
        epilog="A run is evaluated on its own task, or on that of its [evaluation] table. "
        "The same command continues where it was stopped. Keys can be set: --task.level=3 "
        "--model.device=cpu --rollout.max_sequences=64 --rollout.vllm.kv_cache_gib=4",
    )
    evaluation.add_argument(
        "models", nargs="+", help="run, checkpoint, folder, .gguf file, smollm2, or hub name"
    )
    evaluation.add_argument("--suite", type=names, default=[], help="tasks: aime24,amc23")
    evaluation.add_argument("--task", help="one task, or a .jsonl/.parquet; default: a run's own")
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
        "--max-tokens",
        type=at_least_one,
        help="default: a run's own, else 4096; or what the context allows",
    )
    evaluation.add_argument(
        "--max-turns", type=at_least_one, help="of an environment; default: a run's own, else 8"
    )
    evaluation.add_argument("--limit", type=at_least_one, help="first problems of each task")
    evaluation.add_argument("--prompts", type=at_least_one, help="of an endless task; default: 256")
    evaluation.add_argument("--seed", type=int, default=0, help="of the samples")
    evaluation.add_argument("--output", default="evals", help="where the results' folders go")


def add_compare(commands: Commands) -> None:
    """Add the command and its arguments."""
    comparison = add_command(
        commands, "compare", _compare, help="which of two evaluated models is better"
    )
    comparison.add_argument("evaluations", nargs=2, help="folders that eval made, e.g. evals/a")
    comparison.add_argument("--k", type=at_least_one, default=1, help="of pass@k; default: 1")
    comparison.add_argument("--output", help="folder for comparison.json, .md and the plot")


def _eval(options: argparse.Namespace) -> int:
    from trustbatch.build.engines import build_engine
    from trustbatch.build.policies import load_model
    from trustbatch.evaluation.comparison import compare
    from trustbatch.evaluation.report import comparison_table, results_table
    from trustbatch.evaluation.run import ModelEvaluator
    from trustbatch.evaluation.settings import requested_evaluation

    evaluator = ModelEvaluator(load_model=load_model, open_engine=build_engine)
    evaluation = requested_evaluation(options, options.overrides)
    baseline, *others = evaluator.evaluate_models(options.models, evaluation)
    console = Console(soft_wrap=True)
    tables = Console(soft_wrap=True, quiet=is_quiet())
    for each in (baseline, *others):
        tables.print(results_table(each.results), markup=False, highlight=False)
    for other in others:
        table = comparison_table(compare(baseline.results, other.results))
        tables.print(table, markup=False, highlight=False)
    for each in (baseline, *others):
        console.print(f"Results  {each.folder}", markup=False, highlight=False)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from trustbatch.evaluation.comparison import compare
    from trustbatch.evaluation.report import comparison_table, pass_at_k_page
    from trustbatch.evaluation.results import read_results
    from trustbatch.observe.page_parts import as_bytes

    first, second = (read_results(Path(folder)) for folder in options.evaluations)
    comparison = compare(first, second, k=options.k)
    table = comparison_table(comparison)
    Console(soft_wrap=True).print(table, markup=False, highlight=False)
    if options.output is not None:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps(comparison.to_dict(), indent=2) + "\n"
        (folder / "comparison.json").write_text(record, encoding="utf-8")
        (folder / "comparison.md").write_text(table, encoding="utf-8")
        page = pass_at_k_page([first, second])
        (folder / "pass_at_k.html").write_bytes(as_bytes(page))
    return 0
