"""The numbers of docs/results.md and README.md, from the runs and by code that shares nothing."""

import json
import re
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
DEAD = 0.14
RUNS = [json.loads(line) for line in (ROOT / "results/gpu/runs.jsonl").read_text().splitlines()]
PAGE = (ROOT / "docs" / "results.md").read_text()
NAMES = {"PACT": "pact", "P3O": "p3o", "GRPO": "grpo", "CISPO": "cispo", "decoupled": "decoupled"}
COLUMNS = {"fresh": "T = 1", "t0.6": "T = 0.6", "top-p0.95": "top-p 0.95", "lag8": "lag 8"}


def held(arm: str, regime: str, seed: int | None = None) -> np.ndarray:
    """Return the held-out rewards of a cell."""
    return np.array(
        [
            run["held_out"]
            for run in RUNS
            if run["arm"] == arm and run["regime"] == regime and seed in (None, run["seed"])
        ]
    )


def living() -> list[np.ndarray]:
    """Return the cells with several runs of which none is dead."""
    cells = [held(*cell) for cell in sorted({(run["arm"], run["regime"]) for run in RUNS})]
    return [cell for cell in cells if cell.size > 1 and (cell >= DEAD).all()]


def pooled() -> tuple[float, int, int]:
    """Return deviation, degrees of freedom and cells: the mean variance, weighted by degrees."""
    cells = living()
    weights = [cell.size - 1 for cell in cells]
    variance = np.average([cell.var(ddof=1) for cell in cells], weights=weights)
    return float(np.sqrt(variance)), sum(weights), len(cells)


def section(kind: str) -> list[list[str]]:
    """Return the rows of the campaign's table after a mark."""
    text = re.search(rf"<!-- {kind}: results/gpu/runs.jsonl.*?-->(.*?)<!-- end", PAGE, re.DOTALL)
    assert text is not None
    rows = [line for line in text[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def shown(kind: str, name: str, regime: str) -> str:
    """Return what the page has in a cell."""
    head, _, *rows = section(kind)
    return next(row for row in rows if row[0] == name)[head.index(COLUMNS[regime])]


def gains(first: str, second: str) -> np.ndarray:
    """Return the differences by seed, over the largest block of runs that both arms have."""
    common = {(r["regime"], r["seed"]) for r in RUNS if r["arm"] == first} & {
        (r["regime"], r["seed"]) for r in RUNS if r["arm"] == second
    }
    seeds = sorted({seed for _, seed in common})
    regimes = sorted({regime for regime, _ in common})
    blocks = []
    for some in chain.from_iterable(combinations(seeds, n) for n in range(2, len(seeds) + 1)):
        full = [regime for regime in regimes if all((regime, seed) in common for seed in some)]
        blocks.append((len(full) * (len(some) - 1), len(full), [-seed for seed in some], full))
    *_, negated, full = max(blocks)
    return np.array(
        [
            np.mean([held(first, g, -s).item() - held(second, g, -s).item() for g in full])
            for s in negated
        ]
    )


def compared(first: str, second: str) -> list[str]:
    """Return the row of a comparison on the page."""
    return next(row for row in section("arms")[2:] if row[:2] == [first, second])


def interval_of(first: str, second: str) -> tuple[float, float, float]:
    """Return a mean difference and the ends of its t interval."""
    values = gains(NAMES[first], NAMES[second])
    low, high = stats.t.interval(0.95, values.size - 1, values.mean(), stats.sem(values))
    return float(values.mean()), float(low), float(high)


@pytest.mark.parametrize(
    ("name", "regime"),
    [("PACT", "fresh"), ("P3O", "t0.6"), ("GRPO", "lag8"), ("PACT", "top-p0.95")],
)
def test_a_living_cell(name: str, regime: str) -> None:
    cell = held(NAMES[name], regime)
    deviation, degrees, _ = pooled()
    reach = stats.t.ppf(0.975, degrees) * deviation / np.sqrt(cell.size)
    expected = f"{cell.mean():.3f} ± {reach:.3f} ({cell.size})"
    assert shown("intervals", name, regime) == expected


@pytest.mark.parametrize(("name", "regime"), [("P3O", "top-p0.95"), ("CISPO", "t0.6")])
def test_a_cell_with_dead_runs(name: str, regime: str) -> None:
    cell = held(NAMES[name], regime)
    span = f"{cell.mean():.3f}, {cell.min():.3f} to {cell.max():.3f}"
    expected = f"{span} ({cell.size}, **{(cell < DEAD).sum()} dead**)"
    assert shown("intervals", name, regime) == expected


def test_the_pooled_deviation() -> None:
    deviation, degrees, num_cells = pooled()
    assert (
        f"is {deviation:.4f}, pooled over {num_cells} living cells ({degrees} degrees of freedom, "
        f"t = {stats.t.ppf(0.975, degrees):.3f})"
    ) in PAGE


@pytest.mark.parametrize("pair", [("PACT", "P3O"), ("P3O", "GRPO"), ("PACT", "decoupled")])
def test_a_paired_difference(pair: tuple[str, str]) -> None:
    value, low, high = interval_of(*pair)
    assert compared(*pair)[4:6] == [f"{value:+.3f}", f"{low:+.3f} to {high:+.3f}"]


def test_corrected_p_values() -> None:
    pairs = [(row[0], row[1]) for row in section("arms")[2:]]
    p_values = {}
    for pair in pairs:
        values = gains(*(NAMES[name] for name in pair))
        t = abs(values.mean()) / stats.sem(values)
        p_values[pair] = 2 * stats.t.sf(t, values.size - 1)
    ordered = sorted(pairs, key=p_values.__getitem__)
    expected = np.maximum.accumulate(
        [p_values[pair] * (len(pairs) - rank) for rank, pair in enumerate(ordered)]
    ).clip(max=1.0)
    for pair, p_value in zip(ordered, expected, strict=True):
        _, _, _, _, _, _, printed, is_clear, *_ = compared(*pair)
        assert printed == f"{p_value:.3f}"
        assert is_clear == ("**yes**" if p_value <= 0.05 else "no")


def test_counts_of_dead_runs_and_means_over_regimes() -> None:
    for row in section("table")[2:]:
        if row[0] not in NAMES:
            continue
        runs = [run for run in RUNS if run["arm"] == NAMES[row[0]]]
        num_dead = sum(run["held_out"] < DEAD for run in runs)
        regimes = {run["regime"] for run in runs}
        means = [held(NAMES[row[0]], regime).mean() for regime in regimes]
        assert row[-3:] == [
            f"{np.mean(means):.3f}",
            f"{min(means):.3f}",
            f"{num_dead} of {len(runs)}",
        ]


def readme() -> str:
    return (ROOT / "README.md").read_text().partition("## Results so far")[2].partition("\n## ")[0]


def first_section() -> str:
    return PAGE.partition("## What dies, what lives")[2].partition("\n### ")[0]


@pytest.mark.parametrize("text", [readme, first_section])
def test_the_sentences_have_the_numbers_of_the_runs(text: Callable[[], str]) -> None:
    """They are written by hand: new runs may ask for others."""
    words = " ".join(text().split()).replace("95% interval ", "")
    for pair in (("PACT", "P3O"), ("P3O", "GRPO")):
        value, low, high = interval_of(*pair)
        assert f"by {value:.3f} ({low:.3f} to {high:.3f})" in words
        assert compared(*pair)[7] == "**yes**"
    for name in ("P3O", "GRPO"):
        assert shown("intervals", name, "t0.6").removesuffix(" (3)") in words
    hot = [held("grpo", "t1.2"), held("grpo", "t1.2-lag4")]
    assert [(cell < DEAD).sum() for cell in hot] == [3, 3]
    assert "GRPO collapses with six runs of six" in words
    for arm in ("pact", "p3o"):
        assert all((held(arm, regime) >= DEAD).all() for regime in ("t1.2", "t1.2-lag4"))
    defaults = [
        run["held_out"]
        for run in RUNS
        if run["arm"] == ("pact" if run["regime"] == "top-p0.95" else "p3o")
    ]
    assert f"none of its {len(defaults)} runs died" in words
    assert min(defaults) >= DEAD
    # with a death rate of 1 in 7 all would live in 1 of 20 cases
    assert stats.binom.cdf(0, len(defaults), 1 / 7) == pytest.approx(0.05, abs=0.006)
    both = [(held("pact", g, s) - held("p3o", g, s)) for s in (1, 2, 3) for g in WITHOUT_TOP_P]
    by_seed = np.array(both).reshape(3, -1).mean(1)
    low, high = stats.t.interval(0.95, 2, by_seed.mean(), stats.sem(by_seed))
    assert f"by {by_seed.mean():.3f}, {low:.3f} to {high:.3f})" in words


WITHOUT_TOP_P = ("fresh", "t1.2", "t0.6", "lag8", "t1.2-lag4")
