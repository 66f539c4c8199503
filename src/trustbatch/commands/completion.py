"""`trustbatch completion`: a script that completes commands, options and keys in a shell.

It is made from the parsers of all commands and from the keys of the configuration, so that it needs
no Python while somebody types.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trustbatch.commands.base import Commands, add_command, list_commands, option_strings

PROGRAM = "trustbatch"
BuildParser = Callable[[], argparse.ArgumentParser]


@dataclass(frozen=True)
class Words:
    """What can be typed: the commands with their help, and the options and keys of each."""

    commands: Mapping[str, str]
    options: Mapping[str, list[str]]


def add_completion(commands: Commands, build_parser: BuildParser) -> None:
    """Add the command and its arguments."""
    completion = add_command(
        commands,
        "completion",
        lambda options: _completion(options, build_parser()),
        help="a script that completes commands, options and keys in a shell",
        epilog='bash: eval "$(trustbatch completion bash)"; zsh: source <(trustbatch completion '
        "zsh); fish: trustbatch completion fish | source",
    )
    completion.add_argument("shell", choices=tuple(SCRIPTS))


def _completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    sys.stdout.write(SCRIPTS[options.shell](known_words(parser)))
    return 0


def known_words(parser: argparse.ArgumentParser) -> Words:
    """Return everything that a parser knows; commands that take keys have all of them."""
    from trustbatch.config.keys import config_keys

    keys = [f"--{key}" for key in config_keys()]
    parsers = list_commands(parser)
    helps = {name: action.help or "" for name, action in _helps(parser)}
    return Words(
        commands={name: helps.get(name, "") for name in parsers},
        options={
            name: sorted({*option_strings(each), *(keys if each.get_default("takes_keys") else ())})
            for name, each in parsers.items()
        },
    )


def _helps(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.Action]]:
    group = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [(action.dest, action) for action in group._choices_actions]


def _bash(words: Words) -> str:
    cases = "\n".join(
        f'        {name}) options="{" ".join(options)}" ;;'
        for name, options in words.options.items()
    )
    return f"""\
_{PROGRAM}() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" options=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(words.commands)} --help --version" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _{PROGRAM} {PROGRAM}
"""


def _zsh(words: Words) -> str:
    commands = "\n".join(
        f"        {_quoted(f'{name}:{text}')}" for name, text in words.commands.items()
    )
    cases = "\n".join(
        f"        {name}) options=({' '.join(options)}) ;;"
        for name, options in words.options.items()
    )
    return f"""\
#compdef {PROGRAM}
_{PROGRAM}() {{
    local -a commands options
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    case "$words[2]" in
{cases}
    esac
    if [[ "$PREFIX" == -* ]]; then
        compadd -- $options
    else
        _files
    fi
}}
compdef _{PROGRAM} {PROGRAM}
"""


def _fish(words: Words) -> str:
    lines = [f"# completions of {PROGRAM}"]
    for name, text in words.commands.items():
        lines.append(
            f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}"
        )
    for name, options in words.options.items():
        seen = f"'__fish_seen_subcommand_from {name}'"
        for option in options:
            kind = "-l" if option.startswith("--") else "-s"
            lines.append(f"complete -c {PROGRAM} -n {seen} {kind} {option.lstrip('-')}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text in single quotes, as all of these shells read it."""
    return "'" + text.replace("'", "") + "'"


SCRIPTS: dict[str, Callable[[Words], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
