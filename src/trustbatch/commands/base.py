"""What all commands have in common."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from trustbatch.utils.terminal import Verbosity

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command = Callable[[argparse.Namespace], int]
"""from the parsed options to the exit status; `options.overrides` are the dotted keys that were
set, and `options.words` the whole command line"""


def add_command(
    commands: Commands,
    name: str,
    execute: Command,
    *,
    help: str,
    epilog: str | None = None,
    takes_keys: bool = False,
    shows_progress: bool = False,
) -> argparse.ArgumentParser:
    """Add a command.

    `takes_keys` says whether keys of the configuration can be set with it, and `shows_progress`
    whether it can be asked to say less or more.
    """
    parser = commands.add_parser(name, help=help, epilog=epilog)
    parser.set_defaults(execute=execute, takes_keys=takes_keys, verbosity=Verbosity.USUAL)
    if shows_progress:
        how_much = parser.add_mutually_exclusive_group()
        for letter, verbosity, text in (
            ("-q", Verbosity.QUIET, "show only warnings and the last line"),
            ("-v", Verbosity.VERBOSE, "show every step, and a traceback with an error"),
        ):
            how_much.add_argument(
                letter,
                f"--{verbosity.name.lower()}",
                action="store_const",
                dest="verbosity",
                const=verbosity,
                default=Verbosity.USUAL,
                help=text,
            )
    return parser


def list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands, by name."""
    found = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def option_strings(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a command, such as --output."""
    return [word for action in parser._actions for word in action.option_strings]
