"""The direction of imports: packages are layers, and each knows only those below it."""

import ast
import sys
from pathlib import Path

import pytest

import trustbatch

PACKAGE = Path(trustbatch.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# from the bottom: a package or module of a line may import those of earlier lines, and itself
LAYERS = [
    ["errors"],
    ["types"],
    ["utils"],
    ["objectives", "advantages", "math_grading"],
    ["integrations"],
    ["tasks"],
    ["models"],
    ["batching", "weight_sync"],
    ["rollout"],
    ["rewards"],
    ["training"],
    ["checkpoints"],
    ["observe"],
    ["config"],
    ["plan"],
    ["evaluation"],
    ["loops"],
    ["cluster"],
    ["build"],
    ["doctor", "inspection"],
    ["api"],
    ["__init__"],
    ["quickstart"],
    ["studies"],
    ["cli"],
    ["__main__"],
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
# what a package may import from outside, where that is restricted
PURE = ("objectives", "advantages", "types")
LAZY = {"ray": ["cluster"], "vllm": ["rollout/vllm"]}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def top_of(path: Path) -> str:
    """The package, or the module at the top level, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def imported_layers(path: Path, source: str | None = None) -> set[str]:
    """The packages and top-level modules of trustbatch that a file imports."""
    found = set()
    for name in imported_modules(path, source):
        parts = name.split(".")
        if parts[0] != "trustbatch":
            continue
        is_part = len(parts) > 1 and (
            (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()
        )
        found.add(parts[1] if is_part else "__init__")
    return found


def test_every_package_has_a_layer() -> None:
    assert {top_of(path) for path in MODULES} == set(HEIGHT)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    own = top_of(path)
    for other in imported_layers(path) - {own}:
        assert HEIGHT[other] < HEIGHT[own], f"{own} imports {other}, which is not below it"


@pytest.mark.parametrize("path", [p for p in MODULES if top_of(p) in PURE], ids=name_of)
def test_the_math_imports_only_torch_and_the_standard_library(path: Path) -> None:
    allowed = {"torch", "trustbatch", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imported_modules(path)} <= allowed


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_ray_and_vllm_stay_in_their_places(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path)}
    for library, places in LAZY.items():
        if library in roots:
            assert any(path.is_relative_to(PACKAGE / place) for place in places)


def test_the_reader_of_imports_sees_every_form() -> None:
    source = """
import os.path
import ray as r
from vllm import LLM
def late():
    from . import base
    from ..loops import train
    from trustbatch import cluster
    from trustbatch import RunResult
"""
    path = PACKAGE / "objectives" / "p3o.py"
    assert imported_modules(path, source) >= {
        "os.path",
        "ray",
        "vllm.LLM",
        "trustbatch.objectives.base",
        "trustbatch.loops.train",
        "trustbatch.cluster",
    }
    assert imported_layers(path, source) == {"objectives", "loops", "cluster", "__init__"}
