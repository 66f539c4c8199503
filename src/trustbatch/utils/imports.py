"""Objects of a user's own code, named by location: "my_module:name" or "folder/file.py:name"."""

import hashlib
import importlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trustbatch.errors import did_you_mean

_GIVEN: dict[str, Any] = {}
"""objects that were given from Python and can't be imported, by path"""


def check_object_path(path: str) -> None:
    """Refuse a malformed path or one whose module does not exist, without importing anything."""
    if given(path) is not None:
        return
    place, _, name = path.rpartition(":")
    if place == "__main__":
        raise ValueError(
            f"{path!r} is defined in a script or notebook: pass it to trustbatch.train there, or "
            "put it into a file and name that."
        )
    if not place or not name.isidentifier():
        raise ValueError(
            f"{path!r} must be module:name or path/to/file.py:name, such as my_rewards.py:brevity."
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"{path!r} names the file {place}, which does not exist.")
    elif PathFinder.find_spec(place.split(".")[0], [*sys.path, os.getcwd()]) is None:
        raise ValueError(
            f"{path!r} names the module {place}, which is neither in this folder nor installed."
        )


def code_path(found: Any) -> str:
    """Return the path of a class, function or other callable object, as in "my_module:name"."""
    kind = found if hasattr(found, "__qualname__") else type(found)
    return f"{kind.__module__}:{kind.__qualname__}"


def remember(found: Any) -> str:
    """Return the path of an object that was given from Python.

    One that can't be imported, such as a class of a notebook, is found by its path in this process.
    """
    path = code_path(found)
    if path.startswith("__main__:") or "<locals>" in path:
        _GIVEN[path] = found
    return path


def given(path: str) -> Any | None:
    """Return an object that `remember` has seen in this process; None if there is none."""
    return None if "<lambda>" in path else _GIVEN.get(path)  # all lambdas are called the same


def require_package(package: str, *, extra: str, what: str) -> None:
    """Refuse what needs a package that is not installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs a package: pip install 'trustbatch[{extra}]'.")


def load_object(path: str, *, private: bool = False) -> Any:
    """Import the object; raises ImportError with one sentence that says what to change.

    By default a file is imported under its own name, so that other processes can unpickle its
    classes. A `private` file gets a unique module name instead, and may be called like another
    module.
    """
    if (found := given(path)) is not None:
        return found
    place, _, name = path.rpartition(":")
    try:
        if not place.endswith(".py"):
            module = _import_module(place)
        elif private:
            module = _load_private(place)
        else:
            module = _load_file(place)
    except SyntaxError as error:
        raise _unusable(path, f"SyntaxError: {error.msg}, line {error.lineno}") from error
    except ImportError as error:
        raise _unusable(path, f"{type(error).__name__}: {error.msg}") from error
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ImportError(
            f"{path!r}: {place} has no {name}{did_you_mean(name, public)}; check the name after "
            "the colon."
        )
    return getattr(module, name)


def _unusable(path: str, reason: str) -> ImportError:
    return ImportError(f"{path!r} can't be imported ({reason}): fix it.")


def _import_module(place: str) -> ModuleType:
    _add_to_path(os.getcwd())
    return importlib.import_module(place)


def _load_file(place: str) -> ModuleType:
    """Import a file as the module of its name, from the folder that it is in."""
    file = Path(place)
    if not file.is_file():
        raise ImportError(f"the file {place} does not exist")
    existing = importlib.util.find_spec(file.stem)
    if existing is None:
        _add_to_path(str(file.resolve().parent))
    elif existing.origin is None or not Path(existing.origin).samefile(file):
        raise ImportError(f"there is another module {file.stem!r}: rename the file")
    return importlib.import_module(file.stem)


def _load_private(place: str) -> ModuleType:
    """Import a file under a unique name: a random.py must not replace Python's own random."""
    digest = hashlib.sha256(os.path.abspath(place).encode()).hexdigest()[:12]
    name = f"_trustbatch_private_{Path(place).stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
