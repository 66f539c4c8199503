"""The tables of docs/results.md are those of the runs that are kept."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Import a benchmark by its file."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


evidence_table = load("evidence_table")
SHOWN = evidence_table.TABLE.findall((ROOT / "docs" / "results.md").read_text())


@pytest.mark.parametrize(("file", "dead", "shown"), SHOWN, ids=[file for file, _, _ in SHOWN])
def test_a_table_of_the_results_is_that_of_its_runs(file: str, dead: str, shown: str) -> None:
    assert shown == evidence_table.table(ROOT / file, dead=float(dead))


DIFFERENCES = evidence_table.PAIRED.findall((ROOT / "docs" / "results.md").read_text())


@pytest.mark.parametrize(("file", "arm", "shown"), DIFFERENCES)
def test_differences_of_the_results_are_those_of_its_runs(file: str, arm: str, shown: str) -> None:
    assert shown == evidence_table.differences(ROOT / file, arm)


def test_differences_by_hand(tmp_path: Path) -> None:
    # seed 1: (0.1 + 0.3) / 2 = 0.2; seed 2: (0.0 - 0.2) / 2 = -0.1: mean 0.05, error 0.15
    values = {("pact", 1): (0.4, 0.5), ("grpo", 1): (0.3, 0.2)}
    values |= {("pact", 2): (0.4, 0.1), ("grpo", 2): (0.4, 0.3)}
    lines = [
        {"arm": arm, "regime": regime, "seed": seed, "held_out": value}
        for (arm, seed), pair in values.items()
        for regime, value in zip(("fresh", "lag8"), pair, strict=True)
    ]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = evidence_table.differences(file, "pact").splitlines()[-1]
    assert last == "| GRPO | +0.050 | 0.150 | 1 of 2 |"


COMPARISONS = evidence_table.AGREEMENT.findall((ROOT / "docs" / "results.md").read_text())


def test_the_comparison_of_scales_is_that_of_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # it names the files as the page does
    ((first, dead_first, second, dead_second, shown),) = COMPARISONS
    files = Path(first), float(dead_first), Path(second), float(dead_second)
    assert shown == evidence_table.agreement(*files)


def test_a_comparison_by_hand(tmp_path: Path) -> None:
    # four shared cells: ranks 1 2 3 4 and 2 1 3 4, so 1 - 6 * (1 + 1) / (4 * 15) = 0.8
    values = {"fresh": (0.1, 0.2), "t1.2": (0.2, 0.1), "lag8": (0.5, 0.9)}
    for place, name in enumerate(("large", "small")):
        arm = ("grpo", "grpo-0.2")[place]  # two names of one objective
        lines = [
            {"arm": arm, "regime": regime, "seed": 1, "held_out": pair[place]}
            for regime, pair in values.items()
        ]
        lines.append({"arm": "pact", "regime": "fresh", "held_out": 0.6 + place})
        lines.append({"arm": ("cispo", "dapo")[place], "regime": "fresh", "held_out": 0.0})
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = evidence_table.agreement(tmp_path / "large", 0.15, tmp_path / "small", 0.15)
    assert [line.split(" | ")[1].removesuffix(" |") for line in shown.splitlines()[3:]] == [
        "2",
        "0",
        "GRPO at T = 1",
        "GRPO at T = 1.2",
        "0.80",
        "1.00",
    ]


def test_no_placeholder_is_left_on_the_page() -> None:
    assert not re.findall(r"\b[A-Z]{3,}_[A-Z]+\b", (ROOT / "docs" / "results.md").read_text())


def test_every_file_of_runs_is_shown_and_has_each_run_once() -> None:
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("results/*/*.jsonl")}
    assert files == {file for file, _, _ in SHOWN}
    for file in files:
        lines = [json.loads(line) for line in (ROOT / file).read_text().splitlines()]
        runs = [(line["arm"], line["regime"], line["seed"]) for line in lines]
        assert len(runs) == len(set(runs))
        assert all(0.0 <= line["held_out"] <= 1.0 for line in lines)


def test_a_table_by_hand(tmp_path: Path) -> None:
    runs = [("grpo", "fresh", 2, 0.2), ("grpo", "fresh", 1, 0.4), ("grpo", "t1.2", 1, 0.05)]
    runs.append(("pact", "fresh", 1, 0.5))
    file = tmp_path / "runs.jsonl"
    lines = [dict(zip(("arm", "regime", "seed", "held_out"), run, strict=True)) for run in runs]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evidence_table.table(file, dead=0.1).splitlines()[2:] == [
        "| PACT | 0.500 |  |  |  | 0 of 1 |",
        "| GRPO | 0.400 0.200 | **0.050** | 0.175 | 0.050 | 1 of 3 |",
    ]
