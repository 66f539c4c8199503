"""Options of what a configuration names: checked against the arguments of its class or function.

The class is the one home of an option's name, type and default. This module imports neither
pydantic nor torch: grading processes use it.
"""

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trustbatch.errors import did_you_mean

Entry = TypeVar("Entry")

WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
LISTS = (list, tuple, Sequence)


class UnknownOptionError(ValueError):
    """An option that a class or function does not have."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


def find_entry(registry: Mapping[str, Entry], name: str, *, kind: str, also: str = "") -> Entry:
    """Return what a name stands for; an unknown one is refused with the nearest known one.

    `kind` says what it is, such as "objective"; `also` ends the sentence.
    """
    if name not in registry:
        raise ValueError(
            f"There is no {kind} {name!r}{did_you_mean(name, registry)}; choose one of "
            f"{', '.join(registry)}{also}."
        )
    return registry[name]


def option_names(make: Callable[..., Any], *, hidden: Collection[str] = ()) -> list[str]:
    """Return the keyword arguments of a class or function, apart from the hidden ones."""
    return [name for name in _parameters(make) if name not in hidden]


def argument_types(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the keyword arguments of a class or function, by name."""
    hints = _hints(make)
    return {name: hints.get(name) for name in _parameters(make)}


def refuse_unknown(options: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Refuse options that are not known, with the nearest one that is."""
    for option in options:
        if option not in known:
            listed = f"its options are {', '.join(known)}" if known else "it has no options"
            raise UnknownOptionError(
                f"The {what} has no option {option!r}{did_you_mean(option, known)}; {listed}.",
                option,
            )


def check_options(
    make: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    what: str,
    table: str,
    hidden: Collection[str] = (),
) -> None:
    """Refuse unknown options, options of another type than annotated, and missing ones.

    `what` names the thing in sentences, such as "objective p3o", and `table` is where its options
    are set. Hidden arguments are not options: whoever calls the class gives them.
    """
    parameters = _parameters(make)
    refuse_unknown(options, option_names(make, hidden=hidden), what)
    hints = _hints(make)
    for option, value in options.items():
        if option in hints:
            _check(f"{table}.{option}", value, hints[option])
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in (*options, *hidden):
            raise ValueError(f"The {what} needs the option {name}: set {table}.{name}.")


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(make).parameters
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: each for name, each in parameters.items() if each.kind in kinds}


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the arguments; none where annotations name what can't be resolved."""
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
    wanted = [kind for kind in kinds if kind is not type(None)]
    if all(kind in WORDS for kind in wanted):
        words = " or ".join(WORDS[kind] for kind in wanted)
        raise ValueError(f"{key} = {value!r} must be {words}{_write(value, wanted[0])}.")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list: write [{value!r}].")
    element = get_args(wanted[0])[0]
    wrong = next(each for each in value if not _fits(each, element))
    raise ValueError(f"{key} has {wrong!r}: each entry must be {WORDS.get(element, 'a table')}.")


def _is_known(kind: Any) -> bool:
    """Whether a type can be checked here; the class itself checks the others."""
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
