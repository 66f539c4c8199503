"""Source files of a user's code: the one that a path names, and those that it imports beside it."""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
"""folders of installed packages: of those only the named one is followed"""


def source_files(path: str) -> dict[str, str]:
    """Return the source files of an object such as "my_rewards.py:brevity", by name.

    Nothing is imported: a module that only running code would find is not among them.
    """
    place = path.rpartition(":")[0]
    if place.endswith(".py"):
        file = Path(place)
        files = _closure([file] if file.is_file() else [], file.parent, None)
        return {str(each): str(each) for each in files}
    package = place.split(".")[0]
    if package == "trustbatch":  # no code of a user
        return {}
    for root in map(Path, (*sys.path, os.getcwd())):
        if found := list(_modules(root, place)):
            files = _closure(found, root, package if _is_installed(root) else None)
            return {str(each.relative_to(root)): str(each) for each in files}
    return {}


def _is_installed(root: Path) -> bool:
    is_of_python = root.absolute() == Path(os.__file__).parent
    return is_of_python or any(part in INSTALLED for part in root.absolute().parts)


def _closure(files: list[Path], root: Path, package: str | None) -> list[Path]:
    """Add all files below `root` that others import; of one package, if it is given."""
    for file in files:  # which grows meanwhile
        for imported in _imported(file, root, package):
            if imported not in files and imported.is_relative_to(root):
                files.append(imported)
    return files


def _imported(file: Path, root: Path, package: str | None) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it says so
        return
    for node in ast.walk(tree):
        folder = root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level <= len(file.parents):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            folder = file.parents[node.level - 1] if node.level else root
        else:
            continue
        for name in filter(None, names):
            if package is None or folder != root or name.split(".")[0] == package:
                yield from _modules(folder, name)


def _modules(folder: Path, module: str) -> Iterator[Path]:
    """Yield the files of a module in a folder, and of the packages that it is in."""
    words = module.split(".")
    for end in range(1, len(words) + 1):
        place = folder.joinpath(*words[:end])
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                yield file
                break
