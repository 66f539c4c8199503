"""`trustbatch inspect`: from the command line to tables and a page."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from trustbatch.errors import ConfigError


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", help="run folder, e.g. runs/a; the run may be under way")
    parser.add_argument(
        "--step", type=_step, help="default: the one after the newest checkpoint; 1 is the first"
    )
    parser.add_argument(
        "--objective",
        dest="objectives",
        nargs="+",
        action="extend",
        metavar="NAME",
        help='names, "grpo clip_high=0.4", my_file.py:Mine, or all, the default',
    )
    parser.add_argument(
        "--fresh-samples",
        type=_samples,
        metavar="N",
        help="fresh completions of each prompt; default: 8 times as many as the run's; 0: none",
    )
    parser.add_argument(
        "--first-mini-batch",
        action="store_true",
        help="gradients of the first mini-batch; default: of one step on the whole batch",
    )
    parser.add_argument("--json", help="file for everything that was measured")
    parser.add_argument("--page", help="HTML file with tables, weights and tokens")


def inspect_command(options: argparse.Namespace) -> int:
    """Inspect a batch, show it, and write what was asked for."""
    # torch takes seconds to import: a typing error must not wait for it
    from trustbatch.inspection.examine import ALL, Request, inspect_run
    from trustbatch.inspection.page import write_page
    from trustbatch.inspection.result import to_record
    from trustbatch.inspection.terminal import show
    from trustbatch.utils.terminal import LiveLine

    for option, file in (("--json", options.json), ("--page", options.page)):
        if file and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{option} {file} has no folder to be written to: make it first.")
    request = Request(
        folder=Path(options.run),
        step=options.step,
        objectives=tuple(options.objectives or (ALL,)),
        fresh_samples=options.fresh_samples,
        first_mini_batch=options.first_mini_batch,
    )
    line = LiveLine()
    inspection = inspect_run(request, say=line.show)
    line.show("inspected", last=True)
    show(Console(soft_wrap=True), inspection)
    if options.json:
        record = json.dumps(to_record(inspection), indent=2) + "\n"
        Path(options.json).write_text(record, encoding="utf-8")
    if options.page:
        write_page(inspection, Path(options.page))
        Console(soft_wrap=True).print(f"Page  {options.page}", markup=False, highlight=False)
    return 0


def _step(text: str) -> int:
    return _whole(text, least=1)


def _samples(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {least}, not {text!r}"
        )
    return int(text)
