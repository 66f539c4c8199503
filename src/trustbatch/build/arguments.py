"""The arguments of `trustbatch.train` as tables of a configuration.

Rows and a model that were given as objects are written into the run folder, under a name with
their hash, and the configuration names the files: so a run from a notebook is resumed, inspected
and evaluated like any other. Functions and classes stay what they are, and are recorded by name.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustbatch.build.given_files import GivenModel, GivenRows
from trustbatch.config import Config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.objectives import OBJECTIVES, Objective
from trustbatch.rewards.functions import column_names, grades_batches
from trustbatch.tasks import TASKS, Task, check_task
from trustbatch.utils.imports import code_path, remember
from trustbatch.utils.options import option_names

LABEL = re.compile(r"[\w.-]+")
OWN_COLUMNS = ("problem", "answer", "messages", "id")
"""columns whose content a reward function gets in another way"""


@dataclass(frozen=True)
class Arguments:
    """What `trustbatch.train` was given, apart from the name of the run."""

    tree: dict[str, Any]
    """tables, without what is written into the run folder"""
    task: Task | None = None
    """an object of a user's own"""
    rows: GivenRows | None = None
    model: GivenModel | None = None

    def config(self, name: str | None = None) -> Config:
        """Return the configuration of a run of this name, or of the name that was given."""
        tree = dict(self.tree)
        if name is not None:
            tree["run"] = {**tree.get("run", {}), "name": name}
        config = parse_config(tree | self._in_folder(tree, Path()))
        return parse_config(tree | self._in_folder(tree, config.run.path))

    def save(self, config: Config) -> None:
        """Write what the configuration names in its run folder, unless it is there."""
        for each in (self.rows, self.model):
            if each is not None:
                each.save(config.run.path)

    def _in_folder(self, tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        tables: dict[str, Any] = {}
        if self.rows is not None:
            tables["task"] = {**tree["task"], "path": str(folder / self.rows.name)}
        if self.model is not None:
            tables["model"] = {**tree["model"], "name": str(folder / self.model.name)}
        return tables


def read_arguments(
    *, model: Any, tokenizer: Any, task: Any, data: Any, reward: Any, objective: Any, tables: Any
) -> Arguments:
    """Turn the arguments of `trustbatch.train` into tables; refuses what can't be one."""
    given_model = None
    if isinstance(model, str | Path | Mapping):
        if tokenizer is not None:
            raise ConfigError("tokenizer is for a model that is an object: remove it.")
        model_table = _named(str(model) if isinstance(model, Path) else model)
    else:
        given_model, model_table = GivenModel.of(model, tokenizer), {}
    own_task = None
    rows = None if data is None or isinstance(data, str | Path) else GivenRows.of(data)
    if task is None and data is None:
        raise ConfigError("There is nothing to train on: give a task, or data with problems.")
    if task is None or isinstance(task, str | Mapping):
        task_table = _with_data(_named({} if task is None else task), data)
    else:
        check_task(task)
        if data is not None:
            raise ConfigError("A task that is an object has its own data: remove data.")
        own_task, task_table = task, _described(task)
    tree = {
        "model": model_table,
        "task": task_table,
        **tables,
    }
    if objective is not None:
        tree["objective"] = _objective_table(objective)
    if reward is not None:
        tree["reward"] = _reward_table(reward)
        functions = [term["path"] for term in tree["reward"]["terms"] if callable(term.get("path"))]
        _give_columns(task_table, functions, rows, own_task)
    return Arguments(tree, own_task, rows, given_model)


def _named(value: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else dict(value)


def _with_data(table: dict[str, Any], data: Any) -> dict[str, Any]:
    if data is None:
        return table
    if "path" in table:
        raise ConfigError("task.path and data are both given: remove one.")
    path = {"path": str(data)} if isinstance(data, str | Path) else {}
    return {"name": "file", **table, **path}


def _described(task: Task) -> dict[str, Any]:
    """Record of a task given as an object: the path of its class, and its plain fields."""
    described: dict[str, Any] = {}
    if dataclasses.is_dataclass(task):
        for field in dataclasses.fields(task):
            value = getattr(task, field.name)
            if _is_plain(value) or (isinstance(value, list | tuple) and all(map(_is_plain, value))):
                described[field.name] = value
    return described | {"name": code_path(type(task))}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _objective_table(objective: Any) -> dict[str, Any]:
    """Return the table of an objective: a name, a table, a class, or an instance of it."""
    if isinstance(objective, str | Mapping):
        return _named(objective)
    kind = objective if isinstance(objective, type) else type(objective)
    if not issubclass(kind, Objective):
        raise ConfigError(
            f"objective = {objective!r} is none: give a name, a table such as "
            '{"name": "grpo", "clip_high": 0.28}, or a subclass of trustbatch.objectives.Objective.'
        )
    names = {known: name for name, known in OBJECTIVES.items()}
    options: dict[str, Any] = {}
    if not isinstance(objective, type):
        for field in dataclasses.fields(objective):
            value = getattr(objective, field.name)
            if value is not None and value != field.default:
                options[field.name] = value
    return {"name": names.get(kind) or remember(kind), **options}


def _reward_table(reward: Any) -> dict[str, Any]:
    """Return [reward] of a function, the name of a term, a list of both, or a table."""
    table = dict(reward) if isinstance(reward, Mapping) else {}
    terms = table.get("terms", ()) if isinstance(reward, Mapping) else reward
    if isinstance(terms, str) or not isinstance(terms, Sequence):
        terms = [terms]
    return {**table, "terms": [_term(number, term) for number, term in enumerate(terms, start=1)]}


def _term(number: int, term: Any) -> dict[str, Any]:
    if isinstance(term, str | Mapping):
        table = _named(term)
        if not callable(table.get("path")):
            return table
        return {**_term(number, table["path"]), **table}
    if not callable(term):
        raise ConfigError(
            f"reward has {term!r}: give functions such as f(completion, answer), names of terms, "
            "or tables."
        )
    if inspect.iscoroutinefunction(term):
        raise ConfigError(f"The reward {code_path(term)} is asynchronous: give a plain function.")
    remember(term)
    name = code_path(term).rpartition(".")[2].rpartition(":")[2]
    label = {} if LABEL.fullmatch(name) else {"label": f"reward{number}"}
    if name != code_path(term).rpartition(":")[2] and not label:
        label = {"label": name}  # of a function inside another
    kind = "batch_function" if grades_batches(term) else "function"
    return {"name": kind, "path": term, **label}


def _give_columns(
    table: dict[str, Any],
    functions: Sequence[Callable[..., Any]],
    rows: GivenRows | None,
    task: Task | None,
) -> None:
    """Have the task keep the columns that reward functions take; `table` is changed."""
    wanted: dict[str, None] = {}
    for function in functions:
        needed, takes_all = column_names(function)
        wanted.update(dict.fromkeys(needed))
        if takes_all and rows is not None:
            own = {*OWN_COLUMNS, *(table.get("columns") or {}).values()}
            wanted.update(dict.fromkeys(name for name in rows.columns if name not in own))
    if rows is not None and rows.has_no_answers(table):
        table["columns"] = {**(table.get("columns") or {}), "answer": ""}
    wanted.pop("answer", None)
    known: Sequence[str] | None = None if rows is None else rows.columns
    if task is not None:
        known = list(task.prompt(0).details)
    elif "extra_columns" not in option_names(TASKS.get(table["name"], dict)):
        known = []
    for name in wanted:
        if known is not None and name not in known:
            raise ConfigError(
                f"A reward function takes {name!r}, which is no column of the data"
                f"{f' ({json.dumps(list(known))[1:-1]})' if known else ''}: rename the parameter, "
                "or give it a default."
            )
    if wanted and task is None:
        table["extra_columns"] = [*table.get("extra_columns", ()), *wanted]
