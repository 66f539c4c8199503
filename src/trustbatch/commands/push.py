"""`trustbatch push`: a run to a model hub."""

import argparse
from pathlib import Path

from rich.console import Console

from trustbatch.commands.base import Commands, add_command
from trustbatch.utils.arguments import at_least_one
from trustbatch.utils.terminal import is_quiet


def add_push(commands: Commands) -> None:
    """Add the command and its arguments."""
    push = add_command(
        commands,
        "push",
        _push,
        shows_progress=True,
        help="upload a run to a model hub, with a model card",
        epilog="The token is that of HF_TOKEN or `hf auth login`.",
    )
    push.add_argument("folder_of_run", metavar="run", help="run folder, e.g. runs/a")
    push.add_argument("name", help="of the repository, such as owner/model")
    push.add_argument("--step", type=at_least_one, help="of the checkpoint; default: the newest")
    push.add_argument("--private", action="store_true", help="a new repository is private")
    push.add_argument("--update", action="store_true", help="add a commit to one that exists")
    where = push.add_mutually_exclusive_group()
    where.add_argument("--endpoint", help="address of another hub")
    where.add_argument("--folder", help="write the files there, and upload nothing")
    push.add_argument(
        "--dry-run",
        action="store_true",
        help="write the files to --folder, default: hub in the run folder, and list them",
    )
    push.add_argument("--base-model", help="name on the hub of the model that was trained")
    push.add_argument(
        "--evaluation",
        dest="evaluations",
        action="append",
        default=[],
        metavar="FOLDER",
        help="results of `trustbatch eval` for the card; may be repeated",
    )


def _push(options: argparse.Namespace) -> int:
    from trustbatch.hub.push import push
    from trustbatch.utils.terminal import LiveLine

    run = Path(options.folder_of_run)
    folder = options.folder
    if options.dry_run and folder is None:
        folder = run / "hub"
    pushed = push(
        run,
        options.name,
        step=options.step,
        private=options.private,
        update=options.update,
        endpoint=options.endpoint,
        folder=folder,
        base_model=options.base_model,
        evaluations=[Path(each) for each in options.evaluations],
        say=LiveLine().show,
    )
    console = Console(soft_wrap=True, highlight=False)
    for name, size in () if is_quiet() else pushed.files:
        console.print(f"{size:>15,}  {name}", markup=False)
    console.print(f"{'Written' if folder else 'Pushed'}  {pushed.where}", markup=False)
    return 0
