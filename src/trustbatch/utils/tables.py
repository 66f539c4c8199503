"""What the tables of a configuration have in common; each table's class is beside what it sets."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, model_serializer, model_validator

from trustbatch.errors import ConfigError

Value = TypeVar("Value")


class _MayChange:
    """Marks a key that a resumed run may change: it decides where or how fast, not the result."""


Changeable = Annotated[Value, _MayChange()]


class Table(BaseModel):
    """A table of the configuration: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def tables(cls) -> Iterator[tuple[str, "type[Table]"]]:
        """Yield the tables inside this one, or lists of tables, by key."""
        for name, field in cls.model_fields.items():
            kind = table_of(field.annotation)
            if kind is not None:
                yield name, kind

    @classmethod
    def changeable_keys(cls, prefix: str = "") -> Iterator[str]:
        """Yield the dotted keys that a resumed run may change."""
        for name, field in cls.model_fields.items():
            if any(isinstance(each, _MayChange) for each in field.metadata):
                yield f"{prefix}{name}"
        for name, kind in cls.tables():
            yield from kind.changeable_keys(f"{prefix}{name}.")


def table_of(annotation: Any) -> type[Table] | None:
    """Return the table in `Table`, `Table | None` or `tuple[Table, ...]`; None without one."""
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Table)), None
    )


class Choice(Table):
    """A table that names one entry of a registry, with the options of that entry beside the name.

    The options are the arguments of the entry's class or function, which is the one home of their
    names, types and defaults: `check` looks them up there, and `build` of a subclass makes it.
    """

    kind: ClassVar[str]
    """what is chosen, in sentences"""

    name: str
    options: dict[str, Any] = {}
    """those that were given"""

    def check(self) -> None:
        """Refuse a name or an option that can't be used, with one sentence."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = {key: data[key] for key in data if key in cls.model_fields and key != "options"}
        options = {key: value for key, value in data.items() if key not in own}
        return {**own, "options": options}

    @model_validator(mode="after")
    def _check(self) -> "Choice":
        self.check()
        return self

    @model_serializer
    def _flatten(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in type(self).model_fields if name != "options"}
        given = {**own, **self.options}
        return {name: value for name, value in given.items() if value is not None}


def called(make: Callable[..., Value], table: str, options: Mapping[str, Any]) -> Value:
    """Call a class or function with options; a value that it refuses is named with its table."""
    try:
        return make(**options)
    except ValueError as error:
        first = str(error).split(" ")[0]
        raise ValueError(f"{table}.{error}" if first in options else str(error)) from error


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key, such as "rollout.temperature" or "rollout.policies.0.share"."""
    *tables, last = key.split(".")
    node: Any = tree
    for number, table in enumerate(tables):
        if isinstance(node, list):
            node = _entry(node, table, ".".join(tables[:number]))
        else:
            node = node.setdefault(table, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"{key!r} treats {table!r} as a table, but it is a value.")
    if isinstance(node, list):
        raise _not_in_list(node, ".".join(tables))
    node[last] = copy.deepcopy(value)


def _entry(tables: list[Any], number: str, key: str) -> Any:
    if not number.isdecimal() or int(number) >= len(tables):
        raise _not_in_list(tables, key)
    return tables[int(number)]


def _not_in_list(tables: list[Any], key: str) -> ConfigError:
    return ConfigError(
        f"{key} is a list of {len(tables)} tables: name one by its index from 0, and a key of it, "
        f"as in --{key}.0.key=value."
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a tree of tables with dotted keys; those of a list of tables have its numbers."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
