"""Reward functions: a user's own code, named by its path or given as an object from Python.

A function takes what it names: the prompt, the completion, the answer, the prompt's `details`, or
columns of the data. One with other names for its three parameters gets prompt, completion and
answer in this order.
"""

import importlib.util
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from trustbatch.rewards.base import BatchTerm, Sample, Term, is_finite
from trustbatch.utils.imports import check_object_path, code_path, given, load_object

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class _OwnCode:
    """What both kinds of functions have in common."""

    arguments: ClassVar[tuple[str, ...]]

    path: str | Function
    """where the function is, or the function itself"""

    def __post_init__(self) -> None:
        # the configuration of a run that has begun names the function by its path
        found = given(self.path) if isinstance(self.path, str) else None
        if found is not None:
            object.__setattr__(self, "path", found)

    def prepare(self) -> None:
        """Import the function."""
        self._function()

    def check_path(self) -> None:
        """Refuse a path that does not exist."""
        if isinstance(self.path, str):
            check_object_path(self.path)
        elif callable(self.path):
            _check_parameters(self.path, code_path(self.path), self.arguments)
        else:
            raise ValueError(f"function.path = {self.path!r} must be module:name or file.py:name.")

    def _function(self) -> Function:
        if isinstance(self.path, str):
            return _load_function(self.path, self.arguments)
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        """Send a function itself by value where it is defined in a script or notebook."""
        state = dict(vars(self))
        if not isinstance(self.path, str):
            state["path"] = _pickled(self.path)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(
                self, name, pickle.loads(value) if isinstance(value, bytes) else value
            )


@dataclass(frozen=True, kw_only=True)
class FunctionTerm(_OwnCode, Term):
    """A function of one completion, such as f(completion, answer) -> float."""

    arguments: ClassVar = ("prompt", "completion", "answer")

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a path that does not exist."""
        self.check_path()

    def grade(self, sample: Sample) -> float:
        """Call the function."""
        prompt = sample.prompt
        texts = {"prompt": prompt.text, "completion": sample.completion, "answer": prompt.answer}
        values = {**prompt.details, "details": prompt.details, **texts}
        return _call(self._function(), values, self.arguments)


@dataclass(frozen=True, kw_only=True)
class BatchFunctionTerm(_OwnCode, BatchTerm):
    """A function of a whole batch, such as f(completions, answers) -> list[float]."""

    arguments: ClassVar = ("prompts", "completions", "answers")

    time_limit: float = 60.0
    """seconds per batch"""

    def check(self, *, max_tokens: int | None) -> None:
        """Refuse a path that does not exist."""
        self.check_path()
        if not self.time_limit > 0:
            raise ValueError("batch_function.time_limit must be above 0.")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Call the function with the whole batch; runs in a grading process."""
        texts = texts_of(samples)
        names = {name: None for sample in samples for name in sample.prompt.details}
        columns = {name: [each.prompt.details.get(name) for each in samples] for name in names}
        # TRL's functions take the columns of the data by their own names
        columns["answer"] = texts["answers"]
        details = [sample.prompt.details for sample in samples]
        values = list(
            _call(self._function(), {**columns, "details": details, **texts}, self.arguments)
        )
        if len(values) != len(samples):
            raise ValueError(f"it returned {len(values)} rewards for {len(samples)} completions")
        return [float(value) if is_finite(value) else None for value in values]


def texts_of(samples: Sequence[Sample]) -> dict[str, list[str]]:
    """Return the arguments of a batch function, which are also the body of a request."""
    return {
        "prompts": [sample.prompt.text for sample in samples],
        "completions": [sample.completion for sample in samples],
        "answers": [sample.prompt.answer for sample in samples],
    }


def column_names(function: Function) -> tuple[list[str], bool]:
    """Return the columns that a function must have, and whether it takes all others too."""
    known = {*FunctionTerm.arguments, *BatchFunctionTerm.arguments, "details"}
    parameters = _parameters(function)
    needed = [
        name
        for name, each in parameters.items()
        if name not in known and each.default is each.empty and not _is_rest(each)
    ]
    return (needed if known & set(parameters) else []), _takes_rest(parameters)


def grades_batches(function: Function) -> bool:
    """Whether a function is one of a whole batch: it takes `completions`."""
    return "completions" in _parameters(function)


def _call(function: Function, values: Mapping[str, Any], ordered: Sequence[str]) -> Any:
    """Call a function with what it names, or else with the texts in their order."""
    parameters = _parameters(function)
    if parameters and not set(ordered) & set(parameters):
        details = {"details": values["details"]} if "details" in parameters else {}
        return function(*(values[name] for name in ordered), **details)
    if not parameters:  # some built-in functions have no signature
        return function(*(values[name] for name in ordered))
    names = {name for name, each in parameters.items() if not _is_rest(each)}
    for name in names - values.keys():
        if parameters[name].default is inspect.Parameter.empty:
            raise TypeError(
                f"it takes {name!r}, which the data does not give: add the column to "
                "task.extra_columns"
            )
    taken = values.keys() if _takes_rest(parameters) else names & values.keys()
    return function(**{name: values[name] for name in taken})


def _parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def _is_rest(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _takes_rest(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@lru_cache(maxsize=64)
def _load_function(path: str, ordered: tuple[str, ...]) -> Function:
    """Import a user's function; refuse one that can't be called with these arguments."""
    function = load_object(path, private=True)
    if not callable(function):
        raise ImportError(f"{path!r} is not a function, but {type(function).__name__}")
    _check_parameters(function, path, ordered)
    return function


def _check_parameters(function: Function, path: str, ordered: tuple[str, ...]) -> None:
    """Refuse a function that neither names an argument nor takes all of them in their order."""
    parameters = _parameters(function)
    if not parameters or set(ordered) & set(parameters):
        return
    optional = {"details": None} if "details" in parameters else {}
    try:
        inspect.signature(function).bind(*ordered, **optional)
    except TypeError:
        raise TypeError(
            f"{path!r} must take ({', '.join(ordered)}), but it takes {inspect.signature(function)}"
        ) from None


def _pickled(function: Function) -> bytes:
    if importlib.util.find_spec("cloudpickle") is not None:
        import cloudpickle

        return cloudpickle.dumps(function)
    if function.__module__ == "__main__":
        raise pickle.PicklingError(
            f"{code_path(function)} is defined in a script or notebook: pip install "
            "'trustbatch[notebook]'"
        )
    return pickle.dumps(function)
