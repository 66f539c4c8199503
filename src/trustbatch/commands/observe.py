"""`trustbatch report`, `status` and `dashboard`: how runs are doing."""

import argparse
from pathlib import Path

from rich.console import Console

from trustbatch.commands.base import Commands, add_command
from trustbatch.utils.arguments import port


def add_observe(commands: Commands) -> None:
    """Add the commands and their arguments."""
    report = add_command(commands, "report", _report, help="write one HTML page about some runs")
    report.add_argument("runs", nargs="+", help="run folders, e.g. runs/a runs/b")
    report.add_argument(
        "--output",
        help="the HTML file; default: report.html in a run's folder, report-A-B.html beside two",
    )
    status = add_command(
        commands,
        "status",
        _status,
        help="how a run is doing, from another terminal",
        epilog="Exit status 0: running or finished; 1: stopped, failed or dead; 2: no run found.",
    )
    status.add_argument("run", help="run folder, e.g. runs/a")
    status.add_argument("--watch", action="store_true", help="keep showing it until it ends")
    dashboard = add_command(
        commands, "dashboard", _dashboard, help="a live page about all runs of a folder"
    )
    dashboard.add_argument("folder", nargs="?", default="runs", help="default: runs")
    dashboard.add_argument(
        "--port", type=port, default=0, help="of 127.0.0.1; default: one that is free"
    )


def _report(options: argparse.Namespace) -> int:
    from trustbatch.observe.report import default_output, write_report

    folders = [Path(run) for run in options.runs]
    written = write_report(
        folders, Path(options.output) if options.output else default_output(folders)
    )
    Console(soft_wrap=True).print(str(written), markup=False, highlight=False)
    return 0


def _status(options: argparse.Namespace) -> int:
    from trustbatch.observe.status_view import show_status, watch_status

    show = watch_status if options.watch else show_status
    return show(Console(highlight=False), Path(options.run)).exit_code


def _dashboard(options: argparse.Namespace) -> int:
    from trustbatch.observe.dashboard import serve

    console = Console(soft_wrap=True, highlight=False)
    serve(Path(options.folder), options.port, lambda line: console.print(line, markup=False))
    return 0
