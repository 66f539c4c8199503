"""Intervals, comparisons and the picture of the campaign, by hand."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """Import a benchmark by its file, as its own folder sees it."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


intervals, chart = load("evidence_intervals"), load("evidence_chart")


def seeds(*values: float) -> dict[int, float]:
    """Return runs with seeds from 1 on."""
    return dict(enumerate(values, 1))


def lines(file: Path, rows: dict[str, dict[str, dict[int, float]]]) -> Path:
    """Write runs as lines."""
    file.write_text(
        "".join(
            f'{{"arm": "{arm}", "regime": "{regime}", "seed": {seed}, "held_out": {value}}}\n'
            for arm, row in rows.items()
            for regime, cell in row.items()
            for seed, value in cell.items()
        )
    )
    return file


ROWS = {
    # squares 0.0025 + 0.0025, and 0.01 + 0.01 + 0.04, with 1 + 2 degrees of freedom
    "pact": {"fresh": seeds(0.2, 0.3), "t1.2": seeds(0.05, 0.3)},
    "grpo": {"fresh": seeds(0.2, 0.2, 0.5), "t1.2": seeds(0.3)},
}


def test_a_pooled_deviation_by_hand() -> None:
    found = intervals.pool(ROWS, 0.1)
    # sqrt(0.065 / 3); the cell with a dead run and that with one seed are left out
    assert found.deviation == pytest.approx(0.1471960)
    assert (found.num_cells, found.degrees) == (2, 3)
    # t with 3 degrees of freedom is 3.1824 in any table; x 0.147196 / sqrt(2) and / sqrt(3)
    assert found.reach(2) == pytest.approx(0.331242, abs=1e-5)
    assert found.reach(3) == pytest.approx(0.270458, abs=1e-5)


def test_a_run_on_the_line_lives() -> None:
    assert intervals.pool({"pact": {"fresh": seeds(0.1, 0.3)}}, 0.1).num_cells == 1


def test_cells_by_hand(tmp_path: Path) -> None:
    shown = intervals.interval_table(lines(tmp_path / "runs.jsonl", ROWS), dead=0.1).splitlines()
    assert shown[0] == "| objective | T = 1 | T = 1.2 |"
    assert shown[2] == "| PACT | 0.250 ± 0.331 (2) | 0.175, 0.050 to 0.300 (2, **1 dead**) |"
    assert shown[3] == "| GRPO | 0.300 ± 0.270 (3) | 0.300 (1) |"
    assert shown[-1].startswith("The deviation over seeds is 0.1472, pooled over 2 living cells (3")


def test_the_block_of_runs_that_two_arms_share() -> None:
    whole = {regime: seeds(0.0, 0.0, 0.0) for regime in ("fresh", "t1.2", "lag8")}
    five = {**whole, "lag8": seeds(0.0, 0.0, 0.0, 0.0, 0.0)}

    def found(first: dict, second: dict) -> tuple[tuple[str, ...], tuple[int, ...]]:
        design = intervals.design(first, second)
        return design.regimes, design.seeds

    # three regimes x 2 degrees of freedom are more than one x 4
    assert found(five, five) == (("fresh", "t1.2", "lag8"), (1, 2, 3))
    # a fourth regime with two seeds: 4 x 1 against 3 x 2
    assert found({**whole, "fp8": seeds(0, 0)}, {**whole, "fp8": seeds(0, 0)})[1] == (1, 2, 3)
    # 3 x 2 are more than 5 x 1
    more = whole | {"fp8": seeds(0, 0), "lag2": seeds(0, 0)}
    assert found(more, more) == (("fresh", "t1.2", "lag8"), (1, 2, 3))
    # 2 x 1 = 1 x 2: the one with more regimes
    some = {"fresh": seeds(0, 0, 0), "t1.2": seeds(0, 0)}
    assert found(some, some) == (("fresh", "t1.2"), (1, 2))
    # seeds 1, 2 and 2, 3 hold as much: the lower
    split = {"fresh": seeds(0, 0), "t1.2": {2: 0.0, 3: 0.0}}
    assert found(split, split) == (("fresh",), (1, 2))
    # a regime that one of them lacks is left out
    assert found(whole, {"t1.2": seeds(0, 0)}) == (("t1.2",), (1, 2))
    assert intervals.design(whole, {"fresh": seeds(0)}) is None
    assert intervals.design(whole, {"fp8": seeds(0, 0)}) is None
    assert intervals.design(whole, {"fresh": {1: 0.0}, "t1.2": {2: 0.0}}) is None


def test_comparisons_by_hand(tmp_path: Path) -> None:
    rows = {
        "pact": {"fresh": seeds(0.5, 0.5, 0.5), "t1.2": seeds(0.3, 0.3, 0.3)},
        # PACT is ahead by 0.1, 0.2 and 0.3 with T = 1, and as much with T = 1.2
        "grpo": {"fresh": seeds(0.4, 0.3, 0.2), "t1.2": seeds(0.2, 0.1, 0.0)},
        # behind by 0.2, 0.21 and 0.22 with T = 1, and level with T = 1.2
        "cispo": {"fresh": seeds(0.7, 0.71, 0.72), "t1.2": seeds(0.3, 0.3, 0.3)},
        "dapo": {"fresh": seeds(0.5)},
    }
    shown = intervals.arms_table(lines(tmp_path / "runs.jsonl", rows)).splitlines()
    first, second, third = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in shown[2:5]
    )
    # mean 0.2, deviation 0.1: 4.3027 x 0.1 / sqrt(3) = 0.2484.  With two degrees of freedom
    # p = 1 - t / sqrt(2 + t^2), t = 0.2 sqrt(3) / 0.1 = 3.4641: 0.0742, the largest of three,
    # which rises to the 0.0746 of the one before
    head = ["PACT", "GRPO", "2", "1, 2, 3", "+0.200", "-0.048 to +0.448", "0.075", "no", "3 of 3"]
    assert first == [*head, "0.300 (T = 1.2)", "0.100 (T = 1.2)"]
    # mean -0.105, deviation 0.005, t = 36.373: p = 0.000755, x 3 = 0.0023
    head = ["PACT", "CISPO", "2", "1, 2, 3", "-0.105", "-0.117 to -0.093", "0.002", "**yes**"]
    assert second == [*head, "0 of 3", "0.300 (T = 1.2)", "0.300 (T = 1.2)"]
    # -0.3, -0.41, -0.52 and -0.1, -0.2, -0.3: means -0.2, -0.305, -0.41 with deviation 0.105,
    # so t = 5.0312, p = 0.0373, x 2 = 0.0746; 4.3027 x 0.105 / sqrt(3) = 0.2608
    assert third[:2] == ["GRPO", "CISPO"]
    assert third[4:9] == ["-0.305", "-0.566 to -0.044", "0.075", "no", "0 of 3"]
    assert shown[-1] == "No verdict, with one seed in common: DAPO."


def matrix(**changes: Any) -> Any:
    """Return a matrix of three objectives."""
    rows = {
        "grpo": {"fresh": seeds(0.2, 0.24), "t1.2": seeds(0.0, 0.1)},
        "pact": {"fresh": seeds(0.2, 0.22, 0.24), "t1.2": seeds(0.25, 0.1)},
        "cispo": {"fresh": seeds(0.25)},
    }
    fields = {"rows": rows, "dead": 0.14, "untrained": 0.181, "setting": "A < B"} | changes
    return chart.Matrix(**fields)


def test_rows_are_sorted_by_regimes_and_then_by_mean() -> None:
    # CISPO has the highest mean, 0.25, in one regime; PACT 0.1975, GRPO 0.135
    assert matrix().arms == ["pact", "grpo", "cispo"]
    assert matrix().top == 0.26  # the next 0.02 above 0.25


def test_the_picture_marks_every_run() -> None:
    text = chart.draw_matrix(matrix())
    root = ElementTree.fromstring(text)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    # seven of ten runs live; and one of each in the legend
    assert text.count("<circle") == 7 + 1
    assert text.count("<path") == 3 + 1
    assert text.count("url(#hatch)") == 1 + 1
    assert text.count(f'fill="{chart.NO_RUN}"') == 1 + 1
    assert [word for word in words if word and re.fullmatch(r"0\.\d{3}", word)] == [
        *("0.220", "0.175", "0.198", "0.220", "0.050", "0.135", "0.250"),
    ]
    assert [word for word in words if word and " of " in word and word[0].isdigit()] == [
        *("1 of 5", "2 of 4", "0 of 1"),
    ]
    assert "A < B. A number is the mean over seeds." in words
    assert any(word and word.startswith("Planned, and not run yet: T = 0.6;") for word in words)
    story = root.find("{http://www.w3.org/2000/svg}desc")
    assert story is not None
    assert "10 runs, of which 3 are dead: below 0.14" in (story.text or "")


def test_nothing_is_planned_when_every_regime_has_runs() -> None:
    whole = {"pact": {regime: seeds(0.2) for regime in chart.CAMPAIGN}}
    assert "Planned" not in chart.draw_matrix(matrix(rows=whole))


def test_the_picture_stays_within_its_width() -> None:
    whole = {"pact": {regime: seeds(0.2) for regime in chart.CAMPAIGN}}
    root = ElementTree.fromstring(chart.draw_matrix(matrix(rows=whole)))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= chart.WIDTH


def test_colors_and_their_ink() -> None:
    assert chart.shade(0.0) == (68, 1, 84)
    assert chart.shade(1.0) == chart.shade(2.0) == (253, 231, 37)
    assert chart.shade(0.125) == (64, 42, 112)  # half of the way to 59, 82, 139, rounded to even
    assert chart.ink_on((0, 0, 0)) == chart.LIGHT
    assert chart.ink_on((255, 255, 255)) == chart.INK
    # lighter from end to end, as the sum of channels weighted as the eye does
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(chart.shade, STEPS)]
    assert light == sorted(light)


STEPS = [place / 20 for place in range(21)]


def test_labels_are_wrapped_at_words_and_after_commas() -> None:
    assert chart._wrapped("T = 1.2, lag 4", 20) == ["T = 1.2,", "lag 4"]
    assert chart._wrapped("FP8 keys and values", 8) == ["FP8 keys", "and", "values"]
