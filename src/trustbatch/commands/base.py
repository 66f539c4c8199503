"""What all commands have in common."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command = Callable[[argparse.Namespace], int]
"""from the parsed options to the exit status; `options.overrides` are the dotted keys that were
set, and `options.words` the whole command line"""


def add_command(
    commands: Commands,
    name: str,
    run: Command,
    *,
    help: str,
    epilog: str | None = None,
    takes_keys: bool = False,
) -> argparse.ArgumentParser:
    """Add a command; `takes_keys` says whether keys of the configuration can be set with it."""
    parser = commands.add_parser(name, help=help, epilog=epilog)
    parser.set_defaults(run=run, takes_keys=takes_keys)
    return parser
