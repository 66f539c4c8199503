"""Options of tasks, checked against the annotations of their classes."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from trustbatch.errors import did_you_mean

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
LISTS = (list, tuple, Sequence)


def options_of(make: Any) -> list[str]:
    """Return the keyword arguments of a class."""
    parameters = inspect.signature(make).parameters.values()
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def refuse_unknown(options: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse options that are not known, with the nearest one that is."""
    for option in options:
        if option not in known:
            listed = f"its options are {', '.join(known)}" if known else "it has none"
            raise ValueError(
                f"The {where} has no option {option!r}{did_you_mean(option, known)}; {listed}."
            )


def check_options(make: Any, options: Mapping[str, Any], where: str, *, table: str) -> None:
    """Refuse options of another type than the class says, and missing ones."""
    hints = _hints(make)
    for option, value in options.items():
        if option in hints:
            _check(f"{table}.{option}", value, hints[option])
    for parameter in inspect.signature(make).parameters.values():
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if is_needed and parameter.name not in (*options, "name", "seed", "task"):
            raise ValueError(
                f"The {where} needs the option {parameter.name}: set {table}.{parameter.name}."
            )


def _hints(make: Any) -> dict[str, Any]:
    """Return the types of the arguments; none where annotations name what is not there."""
    try:
        if hasattr(make, "__dataclass_fields__") or not inspect.isclass(make):
            return get_type_hints(make)
        return get_type_hints(make.__init__)
    except NameError:
        return {}


def _check(key: str, value: Any, hint: Any) -> None:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not all(_is_known(kind) for kind in kinds) or any(_fits(value, kind) for kind in kinds):
        return
    kind = next(kind for kind in kinds if kind is not type(None))
    if kind in WORDS:
        raise ValueError(f"{key} = {value!r} must be {WORDS[kind]}{_write(value, kind)}.")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list: write [{value!r}].")
    element = get_args(kind)[0]
    words = WORDS.get(element, "a table")
    wrong = next(each for each in value if not _fits(each, element))
    raise ValueError(f"{key} has {wrong!r}: each of the list must be {words}.")


def _is_known(kind: Any) -> bool:
    """Whether a type is one that can be checked here; what is not is left to the class."""
    if kind in WORDS or kind is type(None):
        return True
    elements = get_args(kind)
    is_fixed = get_origin(kind) is tuple and elements[-1:] != (...,)
    return get_origin(kind) in LISTS and not is_fixed and _is_element(elements[0])


def _is_element(kind: Any) -> bool:
    return kind in WORDS or get_origin(kind) in (dict, Mapping)


def _fits(value: Any, kind: Any) -> bool:
    if kind is type(None):
        return value is None
    if kind in WORDS:
        if isinstance(value, bool):
            return kind is bool
        return isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if get_origin(kind) in (dict, Mapping):
        return isinstance(value, Mapping)
    if not isinstance(value, list | tuple):
        return False
    return all(_fits(each, get_args(kind)[0]) for each in value)


def _write(value: Any, kind: type) -> str:
    """Return what was probably meant: `False` in TOML is false."""
    is_word = kind is bool and isinstance(value, str) and value.lower() in ("true", "false")
    return f": write {value.lower()}" if is_word else ""
