"""The lock file has what pyproject.toml and constraints.txt ask for, each with a hash."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"torch"}
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements" / "lock.txt").read_text()
LOCKED = dict(ENTRY.findall(LOCK))


def asked_for() -> list[Requirement]:
    """What the package and its development ask for."""
    words = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    return [Requirement(each) for each in words]


def test_every_line_is_a_package_with_its_hash() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 2 * len(LOCKED)
    assert not LEFT_OUT & LOCKED.keys()


def test_versions_are_those_that_the_project_allows_and_the_constraints_say() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in constraints if line and not line.startswith("#")]
    for each in [*asked_for(), *pinned]:
        name = canonicalize_name(each.name)
        if name in LEFT_OUT:
            assert f"pip install {each}" in LOCK or each not in pinned
        else:
            assert each.specifier.contains(LOCKED[name]), each


def test_what_packages_ask_for_themselves_is_locked_too() -> None:
    waiting, seen = [(each, "") for each in asked_for()], set()
    while waiting:
        each, extra = waiting.pop()
        name = canonicalize_name(each.name)
        if name in seen | LEFT_OUT or (each.marker and not each.marker.evaluate({"extra": extra})):
            continue
        seen.add(name)
        assert name in LOCKED, f"{name} is missing: run requirements/lock.py"
        try:
            waiting += [(Requirement(line), "") for line in requires(name) or []]
        except PackageNotFoundError:  # an extra that is not installed here
            continue
