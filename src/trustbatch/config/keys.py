"""Every dotted key that a configuration can have."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from trustbatch.advantages import ADVANTAGES
from trustbatch.config.tree import Config
from trustbatch.objectives import OBJECTIVES
from trustbatch.tasks import GIVEN, TASKS, Curriculum
from trustbatch.utils.options import argument_types
from trustbatch.utils.tables import Choice, Table, table_of


@cache
def config_keys() -> dict[str, Any]:
    """Return the type of each key, with the options of what a configuration can name.

    A list of tables has the keys of its tables: `reward.terms.weight`. Where two tasks have an
    option of the same name, the type is that of the first.
    """
    keys = dict(_keys_of(Config))
    for name, kind in _options():
        keys.setdefault(name, kind)
    return keys


def is_flag(key: str) -> bool:
    """Whether a key is true or false."""
    kind = config_keys().get(key)
    return kind is bool or kind == bool | None


def _keys_of(table: type[Table], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in table.model_fields.items():
        inside = table_of(field.annotation)
        if inside is not None and name != "suite":
            yield from _keys_of(inside, f"{prefix}{name}.")
        elif not (issubclass(table, Choice) and name == "options"):
            yield f"{prefix}{name}", field.annotation


def _options() -> Iterator[tuple[str, Any]]:
    choices: list[tuple[str, Callable[..., Any]]] = [
        *(("objective", kind) for kind in OBJECTIVES.values()),
        *(("advantage", kind) for kind in ADVANTAGES.values()),
        *(("task", kind) for kind in TASKS.values()),
        ("task.curriculum", Curriculum),
    ]
    for table, make in choices:
        for name, kind in argument_types(make).items():
            if name not in (*GIVEN, "rewards", "task"):
                yield f"{table}.{name}", kind
