"""Tasks by the place of their class: "my_module:MyTask" or "folder/my_task.py:MyTask"."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trustbatch.errors import did_you_mean


def find_class(name: str) -> Any:
    """Import what a name such as "my_module:MyTask" names."""
    place, _, wanted = name.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    if not hasattr(module, wanted):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ValueError(
            f"task.name = {name!r}: {place} has no {wanted}{did_you_mean(wanted, public)}; check "
            "the name after the colon."
        )
    return getattr(module, wanted)


def _import(place: str) -> ModuleType:
    _make_importable(os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"task.name names the module {place!r}, but there is no module {error.name!r}: check "
            "the name, or give a file as in my_task.py:MyTask."
        ) from error
    except (ImportError, SyntaxError) as error:
        raise _unusable(place, error) from error


def _load_file(file: Path) -> ModuleType:
    """Load a file as the module of its name, which other processes can then import too."""
    if not file.is_file():
        raise ValueError(f"task.name names the file {str(file)!r}, which is not there: check it.")
    there = importlib.util.find_spec(file.stem)
    if there is None or there.origin is None or not Path(there.origin).samefile(file):
        if there is not None:
            raise ValueError(
                f"task.name names {str(file)!r}, and there is another module {file.stem!r}: rename "
                "the file."
            )
        _make_importable(str(file.resolve().parent))
    try:
        return importlib.import_module(file.stem)
    except (ImportError, SyntaxError) as error:
        raise _unusable(str(file), error) from error


def _unusable(place: str, error: ImportError | SyntaxError) -> ValueError:
    where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    return ValueError(
        f"task.name names {place!r}, which can't be imported ({type(error).__name__}: {error.msg}"
        f"{where}): fix it."
    )


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
