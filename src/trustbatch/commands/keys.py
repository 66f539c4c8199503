"""Keys of the configuration on the command line: --table.key=value, or --table.key value."""

import argparse
import re

from trustbatch.commands.base import option_strings
from trustbatch.errors import ConfigError, did_you_mean

OPTION = re.compile(r"--?[A-Za-z]")
"""how an option or a key starts, unlike a negative number"""


def split_keys(
    parser: argparse.ArgumentParser, command: str, words: list[str]
) -> tuple[list[str], list[str]]:
    """Return the words without keys of the configuration, and those keys as --key=value.

    What has no dot is a key too where the command has no such option: --seed, or a name of another
    framework, which is refused with what it is called here.
    """
    options = option_strings(parser)
    rest: list[str] = []
    keys: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        name = word.partition("=")[0]
        place += 1
        is_own = "." not in name and any(each.startswith(name) for each in options)
        if not name.startswith("--") or is_own or word == "--":
            rest.append(word)
            continue
        if "." not in name:
            _refuse_misspelled(parser, command, name)
        if "=" in word:
            keys.append(word)
            continue
        following = words[place] if place < len(words) else None
        value = _value(word, following)
        keys.append(f"{word}={value}")
        place += value == following
    return rest, keys


def _value(key: str, following: str | None) -> str:
    """Return the value of a key: the word after it, or true for one that is true or false."""
    from trustbatch.config.keys import is_flag  # needs torch

    if is_flag(key.removeprefix("--")) and following not in ("true", "false"):
        return "true"
    if following is None or OPTION.match(following):
        raise ConfigError(f"{key} has no value: write {key}=VALUE.")
    return following


def _refuse_misspelled(parser: argparse.ArgumentParser, command: str, name: str) -> None:
    from trustbatch.config.keys import config_keys
    from trustbatch.config.peer_names import find_peer_name

    is_key = name.removeprefix("--") in config_keys() or find_peer_name(name.removeprefix("--"))
    if not is_key and did_you_mean(name, option_strings(parser)):
        raise unknown_word(parser, command, name)


def unknown_word(parser: argparse.ArgumentParser, command: str, word: str) -> ConfigError:
    """Return the error for a word that a command has no use for."""
    if not word.startswith("-"):
        return ConfigError(f"{command} takes no further word {word!r}: remove it.")
    name = word.partition("=")[0]
    hint = did_you_mean(name, option_strings(parser))
    return ConfigError(
        f"{command} has no option {name}{hint}: `trustbatch {command} --help` lists them."
    )


def check_values(keys: list[str]) -> None:
    """Refuse a value that the shell has divided: a word that is left over is the rest of it."""
    if keys:
        from trustbatch.config import apply_override

        for key in keys:
            apply_override({}, key)
