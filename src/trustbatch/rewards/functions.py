"""Functions of a user, named by where they are: "my_module:reward" or "folder/file.py:reward"."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trustbatch.errors import did_you_mean
from trustbatch.rewards.worker import describe


def check_path(path: str) -> None:
    """Refuse a path whose form is wrong or whose module is not there; nothing of it is run."""
    place, _, name = path.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"{path!r} must be module:function or path/to/file.py:function, such as "
            "my_rewards.py:brevity."
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"{path!r} names the file {place}, which does not exist.")
    elif PathFinder.find_spec(place.split(".")[0], [*sys.path, os.getcwd()]) is None:
        raise ValueError(
            f"{path!r} names the module {place}, which is neither in this folder nor installed."
        )


@lru_cache(maxsize=64)
def load_function(path: str, *arguments: str) -> Callable[..., Any]:
    """Import the function; one that can't be called with so many arguments is refused."""
    place, _, name = path.rpartition(":")
    try:
        module = _load_file(place) if place.endswith(".py") else _import(place)
    except Exception as error:  # whatever a user's module raises
        raise ImportError(f"{path!r} can't be imported: {describe(error)}") from error
    if not hasattr(module, name):
        public = [each for each in vars(module) if callable(getattr(module, each))]
        raise ImportError(f"{path!r}: {place} has no function {name}{did_you_mean(name, public)}")
    function = getattr(module, name)
    if not callable(function):
        raise ImportError(f"{path!r} is no function, but {type(function).__name__}")
    _refuse_signature(path, function, arguments)
    return function


def _load_file(place: str) -> ModuleType:
    """Load a file under a name of its own: random.py must not stand for Python's own random."""
    digest = hashlib.sha256(os.path.abspath(place).encode()).hexdigest()[:12]
    name = f"_trustbatch_reward_{Path(place).stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(place: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()
    return importlib.import_module(place)


def _refuse_signature(path: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return
    named = {"details": None} if takes_details(function) else {}
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        raise TypeError(
            f"{path!r} must take ({', '.join(arguments)}), but it takes {signature}"
        ) from None


def takes_details(function: Callable[..., Any]) -> bool:
    """Whether a function asks for the details of a prompt, by a parameter of that name."""
    try:
        return "details" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False
