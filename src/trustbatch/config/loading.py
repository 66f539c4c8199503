"""From a TOML file and overrides to a `Config`: every problem becomes one sentence.

Defaults < TOML file < dotted overrides. Unknown keys are refused.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trustbatch.config.keys import config_keys
from trustbatch.config.peer_names import find_peer_name
from trustbatch.config.tree import Config
from trustbatch.errors import ConfigError
from trustbatch.utils.options import UnknownOptionError
from trustbatch.utils.tables import Table, flatten, set_key, table_of


def load_config(path: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides such as "--training.steps=10"."""
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            inside = file / "config.toml"  # a run folder has its own
            hint = f"give {str(inside)!r}" if inside.is_file() else "check the path"
            raise ConfigError(f"There is no configuration file {str(path)!r}: {hint}.")
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree)


def as_config(config: "str | Path | Mapping[str, Any] | Config") -> Config:
    """Return a configuration given as a TOML file, as its tables, or as itself.

    Of tables that name something, the name alone will do: {"model": "smollm2", ...}.
    """
    if isinstance(config, Config):
        return config
    if not isinstance(config, Mapping):
        return load_config(config)
    named = ("model", "task", "objective", "advantage")
    return parse_config(
        {
            key: {"name": value} if key in named and isinstance(value, str) else value
            for key, value in config.items()
        }
    )


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key, e.g. "--rollout.temperature=1.2"."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not override.startswith("--") or not equals or not key:
        raise ConfigError(f"{override!r} is not an override: write --table.key=value.")
    set_key(tree, key, _parse_value(key, text))


def _parse_value(key: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and not text.endswith("]"):
            raise ConfigError(
                f"--{key} has only a part of a list, {text}: put the whole of it in quotes, "
                f"as in --{key}='[a, b]'."
            ) from None
        return text  # a bare word is a string


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Check a tree of plain values; every problem becomes one sentence that says what to change."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # a key of several types reports each of them: one sentence a key is enough
        sentences = {_key(item["loc"]): _sentence(item) for item in reversed(error.errors())}
        raise ConfigError("\n".join(reversed(sentences.values()))) from None


def _key(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the part of an error's location that is a key: types of a union may follow it."""
    in_list = len(location) > 2 and isinstance(location[2], int)
    return tuple(location[:4] if in_list else location[:2])


def _sentence(item: Any) -> str:
    location = [str(part) for part in item["loc"] if not str(part).startswith("function-")]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        return _unknown(key, location, item["input"])
    if item["type"] in ("model_type", "dict_type"):
        first = next(iter(_known_keys(location)), "name")
        return f"{key} is a table: set {key}.{first}, or another key of it."
    if key == "evaluation.suite" and item["type"] == "tuple_type":
        return f"{key} is a list: write {key} = [{json.dumps(item['input'], default=str)}]."
    if item["type"] == "tuple_type" and _known_keys(location):
        return f"{key} is a list of tables: write [[{key}]], in two brackets, above each."
    if item["type"] == "missing":
        key = f"{key}.name" if key in ("model", "task") else key
        return f"{key} is missing: set it in the file or with --{key}=..."
    message = item["msg"].removeprefix("Value error, ").rstrip(".")
    if item["type"] == "value_error":
        message += _translated_option(key, item["ctx"]["error"])
        # one that starts with a key or a capital letter is a whole sentence
        is_whole = "." in message.split(" ")[0] or message[0].isupper()
        return f"{message}." if is_whole else f"{_prefix(key)}{message}."
    return f"{key} = {json.dumps(item['input'], default=str)}: {message[0].lower()}{message[1:]}."


def _unknown(key: str, location: Sequence[str], value: Any) -> str:
    """Return the sentence for an unknown key: another framework's, the nearest, or all known."""
    # a table of another framework is unknown as a whole: its keys tell more than its name
    inside = flatten(value) if isinstance(value, Mapping) else {}
    for full in [f"{key}.{each}" for each in inside] or [key]:
        if peer := find_peer_name(full):
            return f"Unknown key {full!r}: {peer.sentence()}."
    known = _known_keys(location[:-1])
    elsewhere = {each.rpartition(".")[2]: each for each in reversed(config_keys())}
    own = {name: ".".join([*location[:-1], name]) for name in known}
    for names, likeness in ((own, 0.75), (elsewhere, 0.85), (own, 0.6)):
        if close := get_close_matches(location[-1], names, n=1, cutoff=likeness):
            return f"Unknown key {key!r}: did you mean {names[close[0]]!r}?"
    return f"Unknown key {key!r}: known are {', '.join(known)}."


def _translated_option(table: str, problem: Exception) -> str:
    """Return what an unknown option is called here, to append; empty where it is our own word."""
    if not isinstance(problem, UnknownOptionError):
        return ""
    key = f"{table}.{problem.option}"
    peer = None if key in config_keys() else find_peer_name(key)
    return "" if peer is None else f"; {peer.sentence()}"


def _prefix(key: str) -> str:
    return f"{key}: " if key else ""


def _known_keys(keys: Sequence[str]) -> list[str]:
    """Return the keys of a table, or of the tables in a list; none where it is a value."""
    table: type[Table] | None = Config
    for key in keys:
        if table is not None and not key.isdecimal():
            table = table_of(table.model_fields[key].annotation)
    return [] if table is None else list(table.model_fields)
