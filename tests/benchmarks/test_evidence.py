"""The tables of docs/results.md are those of the runs that are kept."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Import a benchmark by its file, as its own folder sees it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


evidence_table = load("evidence_table")
PAGE = (ROOT / "docs" / "results.md").read_text()
MARKED = evidence_table.MARKED.findall(PAGE)
SHOWN_FILES = {
    file
    for kind, words, _ in MARKED
    if kind in ("table", "gains")
    for file in words.split()
    if file.endswith(".jsonl")
}


@pytest.mark.parametrize(("kind", "words", "shown"), MARKED, ids=[f"{k} {w}" for k, w, _ in MARKED])
def test_the_results_are_those_of_their_runs(
    kind: str, words: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the page names files from here
    assert shown == evidence_table.generated(kind, words)


def test_the_page_and_its_pictures_are_what_is_generated() -> None:
    assert {kind for kind, *_ in MARKED} == {
        "table",
        "intervals",
        "arms",
        "paired",
        "agreement",
        "gains",
    }
    assert evidence_table.filled(PAGE) == PAGE
    for name, picture in evidence_table.DRAWN.items():
        assert (evidence_table.PICTURES / name).read_text() == picture.draw()
        assert f"](images/{name})" in PAGE
    assert "](docs/images/evidence-matrix.svg)" in (ROOT / "README.md").read_text()


def test_one_command_writes_the_page_and_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    monkeypatch.setattr(evidence_table, "PAGE", page)
    monkeypatch.setattr(evidence_table, "PICTURES", tmp_path)
    for file, arguments in ((other, [str(other)]), (page, [])):
        assert not list(tmp_path.glob("*.svg"))  # those of another page are not written
        file.write_text(PAGE.replace("| 0 of 20 |", "| 1 of 20 |"))
        monkeypatch.setattr(sys, "argv", ["evidence_table.py", "--update", *arguments])
        evidence_table.main()
        assert file.read_text() == PAGE
    for name, picture in evidence_table.DRAWN.items():
        assert (tmp_path / name).read_text() == picture.draw()


def test_an_unknown_mark_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no mark 'tables' with 'a\.jsonl 0\.1'"):
        evidence_table.generated("tables", "a.jsonl 0.1")


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
    assert files == SHOWN_FILES
    for file in files:
        lines = [json.loads(line) for line in (ROOT / file).read_text().splitlines()]
        runs = [(line["arm"], line["regime"], line["seed"]) for line in lines]
        assert len(runs) == len(set(runs))
        assert all(0.0 <= line["held_out"] <= 1.0 for line in lines)


def test_gains_by_hand(tmp_path: Path) -> None:
    # 0.3 and 0.5: mean 0.4, deviation 0.1414, error 0.1; from 0.1 on, the gain is 0.3
    files = []
    for quantization, after in (({}, (0.3, 0.5)), ({"quantization": "nf4"}, (0.2, 0.2))):
        files.append(tmp_path / f"{len(files)}.jsonl")
        lines = [
            {
                "seed": seed,
                "held_out": value,
                "held_out_before": 0.1,
                "config": {"model": quantization},
            }
            for seed, value in ((2, after[1]), (1, after[0]))
        ]
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evidence_table.gains(*files).splitlines()[2:] == [
        "| bfloat16 | 0.100 | 0.300 0.500 | 0.400 | 0.300 ± 0.100 |",
        "| nf4 | 0.100 | 0.200 0.200 | 0.200 | 0.100 ± 0.000 |",
    ]


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
