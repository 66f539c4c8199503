"""docs/reliability.md says what the last count of kills, damage and attacks has found."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
SUMMARY = json.loads((ROOT / "results" / "reliability.json").read_text(encoding="utf-8"))
PROMISED = {"kills": 132, "damage": 76, "cluster": 21, "rewards": 50, "grader": 140}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("script", ROOT / "benchmarks" / "reliability.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_the_summary() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert script().table_of(SUMMARY) in page


def test_as_much_was_tried_as_a_promise_needs() -> None:
    counts = SUMMARY["counts"]
    totals = {group: counts[group][name] for group, name in script().TOTALS.items()}
    assert all(totals[group] >= least for group, least in PROMISED.items()), totals
    assert counts["kills"]["checkpoint"] >= 20
    assert counts["grader"]["reward_zero"] == totals["grader"]
    assert counts["damage"].get("wrong", 0) == 0


def test_the_tests_that_count_are_there() -> None:
    assert all((ROOT / name).is_file() for name in script().TESTS)
