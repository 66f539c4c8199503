"""The command line: parse, build, call."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence

from rich.console import Console

from trustbatch import __version__
from trustbatch.commands.base import add_command, list_commands
from trustbatch.commands.completion import add_completion
from trustbatch.commands.doctor import add_doctor
from trustbatch.commands.evaluate import add_compare, add_eval
from trustbatch.commands.init import add_init
from trustbatch.commands.keys import check_values, split_keys, unknown_word
from trustbatch.commands.observe import add_observe
from trustbatch.commands.push import add_push
from trustbatch.commands.quickstart import add_quickstart
from trustbatch.commands.train import add_train
from trustbatch.errors import ConfigError, TrustbatchError, did_you_mean
from trustbatch.inspection.command import add_inspect_arguments, inspect_command
from trustbatch.studies.command import add_study_arguments, study_command
from trustbatch.utils.system_errors import explain
from trustbatch.utils.terminal import Verbosity, is_verbose, plain_line, set_verbosity

SECONDS_FOR_RANK_ZERO = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an error a user can act on is printed without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    set_verbosity(Verbosity.USUAL)
    try:
        return _run(words)
    except KeyboardInterrupt:
        again = " The same command continues from the last checkpoint, if there is one."
        again = again if "train" in words else ""
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
        if is_verbose():
            Console(stderr=True, soft_wrap=True).print(
                _printable("".join(traceback.format_exception(error))), markup=False
            )
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


def _run(words: list[str]) -> int:
    parser = build_parser()
    commands = list_commands(parser)
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in commands:
        raise ConfigError(
            f"There is no command {command!r}{did_you_mean(command, commands)}: choose one of "
            f"{', '.join(commands)}."
        )
    if command is not None:  # -q and -v may stand before the command, too
        place = words.index(command)
        words = [command, *words[:place], *words[place + 1 :]]
    keys: list[str] = []
    rest = words
    if command is not None and commands[command].get_default("takes_keys"):
        rest, keys = split_keys(commands[command], command, words)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        check_values(keys)
        raise unknown_word(commands[options.command], options.command, unknown[0])
    options.words, options.overrides = words, keys
    set_verbosity(options.verbosity)
    return options.execute(options)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="trustbatch", description="RL on language models with measured trust in each batch."
    )
    parser.add_argument("--version", action="version", version=f"trustbatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_init(commands)
    add_train(commands)
    add_doctor(commands)
    add_inspect_arguments(
        add_command(
            commands,
            "inspect",
            inspect_command,
            help="what each objective would do to a batch of a run",
            shows_progress=True,
            epilog="Nothing is trained, and the run folder is only read.",
        )
    )
    add_observe(commands)
    add_eval(commands)
    add_compare(commands)
    add_study_arguments(
        add_command(
            commands,
            "study",
            lambda options: study_command(options, options.words),
            help="compare objectives as the paper does, at several scales",
            shows_progress=True,
            epilog="The same command continues where it was stopped. "
            "Exit status 1: a run has failed.",
        )
    )
    add_push(commands)
    add_quickstart(commands)
    add_completion(commands, build_parser)
    return parser
