"""What a study would run: its arms, their changes, and the memory of the first."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trustbatch.config import parse_config
from trustbatch.plan import describe_plan
from trustbatch.plan.hardware import find_hardware
from trustbatch.plan.memory import GIB
from trustbatch.studies.benchmarks import NAME as BENCHMARKS
from trustbatch.studies.jobs import run_tree
from trustbatch.studies.study import Scale, Study, Suite
from trustbatch.studies.tiny_models import tiny_models_in


def show_plan(console: Console, study: Study, scale: Scale, *, out: Path, models: Path) -> None:
    """Check every configuration and print the arms; loads no weights and needs no GPU."""
    table = Table(title=f"{study.title}, {study.scale} scale: {study.question}")
    for heading in ("arm", "regime", "changes"):
        table.add_column(heading, overflow="fold")
    seed = study.seeds[0]
    trees = [run_tree(study, arm, seed, out=out, models=models) for arm in study.arms]
    for arm, tree in zip(study.arms, trees, strict=True):
        parse_config(tree)
        changes = ", ".join(f"{key} = {_toml_value(value)}" for key, value in arm.changes.items())
        table.add_row(arm.name, arm.regime, changes)
    console.print(table)
    seeds = ", ".join(map(str, study.seeds))
    num_runs = len(study.arms) * len(study.seeds)
    is_trained = study.name != BENCHMARKS
    what = "runs" if is_trained else "evaluations"
    console.print(f"{len(study.arms)} arms x seeds {seeds} = {num_runs} {what} in {out}")
    if not is_trained:
        longest = max(parse_config(tree).rollout.max_tokens for tree in trees)
        console.print(
            _describe_suite(scale.suite, max(longest, scale.suite.max_tokens)), markup=False
        )
        return
    config = parse_config(trees[0])
    console.print(f"\nThe first arm, {study.arms[0].name}:\n", markup=False)
    console.print(config.to_toml(), markup=False)
    missing = [path for path in tiny_models_in(trees[0]) if not path.is_dir()]
    if missing:
        names = ", ".join(map(str, missing))
        console.print(f"model       {names}: a tiny model, made at the start", markup=False)
        return
    memory = None if scale.gpu_memory_gib is None else scale.gpu_memory_gib * GIB
    hardware = find_hardware(config, gpu_memory=memory)
    console.print(describe_plan(config, hardware=hardware), markup=False)


def _describe_suite(suite: Suite, max_tokens: int) -> str:
    names = ", ".join(task.get("label", task["name"]) for task in suite.tasks)
    return (
        f"\nsuite       {names}\n"
        f"samples     {suite.samples} of each problem at temperature {suite.temperature:g}, "
        f"top-p {suite.top_p:g}, at most {max_tokens} tokens"
    )


def _toml_value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
