"""`trustbatch quickstart`: a tiny model, P3O beside GRPO."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trustbatch.commands.base import Commands, add_command
from trustbatch.utils.arguments import at_least_one
from trustbatch.utils.terminal import is_quiet


def add_quickstart(commands: Commands) -> None:
    """Add the command and its arguments."""
    quickstart = add_command(
        commands,
        "quickstart",
        _quickstart,
        shows_progress=True,
        help="a few minutes on a CPU: tiny model, P3O beside GRPO, report",
    )
    quickstart.add_argument("--folder", default="runs/quickstart", help="where results go")
    quickstart.add_argument("--steps", type=at_least_one, default=60, help="of each run")
    quickstart.add_argument("--seed", type=int, default=0, help="of the model and all runs")
    quickstart.add_argument(
        "--model-only", action="store_true", help="make the tiny model, and train nothing"
    )


def _quickstart(options: argparse.Namespace) -> int:
    from trustbatch.quickstart import (
        EXPLANATION,
        HEADINGS,
        NUM_WORDS,
        quickstart,
        quickstart_model,
    )

    console = Console(soft_wrap=True)
    folder, seed = Path(options.folder), options.seed

    def say(line: str) -> None:
        if not is_quiet():
            console.print(line, highlight=False)

    if options.model_only:
        model = quickstart_model(folder, seed=seed, say=say)
        console.print(f"Model   {model}", highlight=False)
        return 0
    result = quickstart(folder, steps=options.steps, seed=seed, say=say)
    if is_quiet():
        console.print(f"Report  {result.report}", highlight=False)
        return 0
    table = Table(title=result.title)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place < NUM_WORDS else "right")
    for row in result.rows:
        table.add_row(*row.cells)
    console.print(table)
    console.print(EXPLANATION, highlight=False)
    console.print(f"Report  {result.report}", highlight=False)
    return 0
