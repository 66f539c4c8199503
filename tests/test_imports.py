"""The direction of imports: the math depends on torch alone, and nothing depends on the loops."""

import ast
import sys
from pathlib import Path

import pytest

import trustbatch

PACKAGE = Path(trustbatch.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PURE = [
    path
    for path in MODULES
    if path.is_relative_to(PACKAGE / "objectives")
    or path in (PACKAGE / "advantages.py", PACKAGE / "types.py")
]
# who may drive a run: the entry points, and the drivers themselves
DRIVERS = ("loops", "cluster", "__init__", "cli", "api", "quickstart", "session")


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_modules(path: Path, source: str | None = None) -> set[str]:
    """Full dotted names of everything a file imports, at any depth of nesting.

    `from a import b` yields both a and a.b, since b may be a module.
    """
    tree = ast.parse(path.read_text() if source is None else source)
    package = ["trustbatch", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return names


def belongs_to(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_the_math_imports_only_torch_and_the_standard_library(path: Path) -> None:
    allowed = ("torch", "trustbatch.objectives", "trustbatch.types", *sys.stdlib_module_names)
    for name in imported_modules(path) - {"trustbatch"}:
        assert any(belongs_to(name, module) for module in allowed), f"imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_ray_and_vllm_stay_in_their_places(path: Path) -> None:
    # Ray only where processes are placed; vLLM only behind its engine's protocol
    in_cluster = path.is_relative_to(PACKAGE / "cluster")
    is_engine = path.is_relative_to(PACKAGE / "rollout" / "vllm")
    if in_cluster or is_engine:
        return
    names = imported_modules(path)
    assert not [n for n in names if belongs_to(n, "ray") or belongs_to(n, "vllm")]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_but_the_entry_points_imports_the_loops(path: Path) -> None:
    inside = path.relative_to(PACKAGE)
    if inside.parts[0].removesuffix(".py") in DRIVERS:
        return
    drivers = ("trustbatch.loops", "trustbatch.cluster")
    names = imported_modules(path)
    assert not [n for n in names if any(belongs_to(n, driver) for driver in drivers)]


def test_the_reader_of_imports_sees_every_form() -> None:
    source = """
import os.path
import ray as r
from vllm import LLM
def late():
    from . import base
    from ..loops import sync
    from trustbatch import cluster
"""
    assert imported_modules(PACKAGE / "objectives" / "p3o.py", source) >= {
        "os.path",
        "ray",
        "vllm.LLM",
        "trustbatch.objectives.base",
        "trustbatch.loops.sync",
        "trustbatch.cluster",
    }
    assert {"p3o.py", "__init__.py", "metrics.py"} <= {path.name for path in PURE}
