"""Functions of a user, named by where they are: "my_module:reward" or "folder/file.py:reward"."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


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
def load_function(path: str) -> Callable[..., Any]:
    """Import the function."""
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} can't be imported.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"{place} has no function {name}.")
    return function


def takes_details(function: Callable[..., Any]) -> bool:
    """Whether a function asks for the details of a prompt, by a parameter of that name."""
    try:
        return "details" in inspect.signature(function).parameters
    except ValueError:  # some built-in functions have no signature
        return False
