"""Fields of a JSON line, checked: an error names the line, the field and what to change."""

import math
from collections.abc import Mapping
from typing import Any

from trustbatch.errors import ConfigError

Json = Mapping[str, Any]


class FieldError(ConfigError):
    """A field is missing, or is not what the format says."""


def fault(line: int, sentence: str) -> FieldError:
    """Return the error of a line."""
    return FieldError(f"Line {line} of the rollouts {sentence}.")


def token_ids(value: Any, *, line: int, name: str) -> tuple[int, ...]:
    """Return a list of token ids."""
    is_list = isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value
    )
    if not is_list:
        raise fault(line, f"has no usable {name!r}: it must be a list of token ids")
    return tuple(value)


def logprobs(value: Any, *, line: int, name: str) -> tuple[float, ...]:
    """Return a list of log-probs; null becomes NaN, as JSON has no word for it."""
    is_list = isinstance(value, list) and all(
        each is None or (isinstance(each, int | float) and not isinstance(each, bool))
        for each in value
    )
    if not is_list:
        raise fault(
            line,
            f"has no usable {name!r}: it must be a list of numbers, one for each token; engines "
            "return them only where log-probs are requested",
        )
    return tuple(math.nan if each is None else float(each) for each in value)


def text(record: Json, name: str, *, line: int) -> str | None:
    """Return a text, or None without one."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise fault(line, f"has a {name!r} that is not text")
    return value


def number(record: Json, name: str, *, line: int) -> float | None:
    """Return a number, or None without one."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise fault(line, f"has a {name!r} that is not a number")
    return float(value)


def table(record: Json, name: str, *, line: int) -> Json:
    """Return an object, empty without one."""
    value = record.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fault(line, f"has a {name!r} that is not an object")
    return value
