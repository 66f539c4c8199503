"""How certain the numbers of the campaign are, by the rules of docs/evidence.md.

Cells have intervals from the deviation over seeds that is pooled over living cells. Arms are
compared by the mean over regimes, paired over seeds, with Holm's correction for all pairs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from evidence_runs import LABELS, REGIMES, Row, markdown, read_rows, shown_regimes

from trustbatch.evaluation.statistics import LEVEL
from trustbatch.studies.comparisons import (
    Contender,
    Outcome,
    PairedDifference,
    holm,
    mean_interval,
    t_quantile,
)


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """The standard deviation over seeds that living cells share."""

    deviation: float
    num_cells: int
    degrees: int

    @property
    def quantile(self) -> float:
        """Student's t for an interval."""
        return t_quantile(LEVEL, self.degrees)

    def reach(self, num_seeds: int) -> float:
        """Return half the width of the interval of a mean over so many seeds."""
        return self.quantile * self.deviation / math.sqrt(num_seeds)


@dataclass(frozen=True, kw_only=True)
class Design:
    """Regimes and seeds that two arms both have in full."""

    regimes: tuple[str, ...]
    seeds: tuple[int, ...]

    def mean(self, row: Row, seed: int) -> float:
        """Return an arm's mean over the regimes with one seed."""
        return fmean(row[regime][seed] for regime in self.regimes)

    def worst(self, row: Row) -> tuple[str, float]:
        """Return the regime with an arm's lowest mean over the seeds, and that mean."""
        means = {regime: fmean(row[regime][seed] for seed in self.seeds) for regime in self.regimes}
        regime = min(means, key=means.__getitem__)
        return regime, means[regime]


def pool(rows: Mapping[str, Row], dead: float) -> Pooled:
    """Return the deviation over the living cells with two seeds or more."""
    squares, degrees, num_cells = 0.0, 0, 0
    for row in rows.values():
        for seeds in row.values():
            values = list(seeds.values())
            if len(values) > 1 and min(values) >= dead:
                center = fmean(values)
                squares += sum((value - center) ** 2 for value in values)
                degrees += len(values) - 1
                num_cells += 1
    assert degrees, "No living cell has two seeds."
    return Pooled(deviation=math.sqrt(squares / degrees), num_cells=num_cells, degrees=degrees)


def interval_table(file: Path, *, dead: float) -> str:
    """Return the Markdown table of all cells with their intervals, and what these rest on."""
    rows = read_rows(file)
    pooled = pool(rows, dead)
    regimes = shown_regimes(rows)
    lines = [["objective", *(REGIMES[each] for each in regimes)], ["---"] * (len(regimes) + 1)]
    for arm, row in rows.items():
        cells = [_cell(row[each], dead, pooled) if each in row else "" for each in regimes]
        lines.append([LABELS[arm], *cells])
    return (
        f"{markdown(lines)}\n\nThe deviation over seeds is {pooled.deviation:.4f}, pooled over "
        f"{pooled.num_cells} living cells ({pooled.degrees} degrees of freedom, "
        f"t = {pooled.quantile:.3f})."
    )


def _cell(seeds: Mapping[int, float], dead: float, pooled: Pooled) -> str:
    """Return a mean with an interval, with a range where runs are dead, or one seed alone."""
    values = list(seeds.values())
    shown, num_dead = f"{fmean(values):.3f}", sum(value < dead for value in values)
    if num_dead:
        span = f", {min(values):.3f} to {max(values):.3f}" if len(values) > 1 else ""
        return f"{shown}{span} ({len(values)}, **{num_dead} dead**)"
    if len(values) == 1:
        return f"{shown} (1)"
    return f"{shown} ± {pooled.reach(len(values)):.3f} ({len(values)})"


def design(first: Row, second: Row) -> Design | None:
    """Return the regimes and seeds of a comparison; None if no two seeds are shared.

    Those with the most degrees of freedom, regimes times (seeds - 1); then the most regimes.
    """
    shared = {
        regime: set(first[regime]) & set(second[regime]) for regime in first if regime in second
    }
    every = sorted(set().union(*shared.values()))
    found = [
        Design(regimes=tuple(each for each in shared if set(seeds) <= shared[each]), seeds=seeds)
        for count in range(2, len(every) + 1)
        for seeds in combinations(every, count)
    ]
    # the first of equals has the fewest seeds, so the most regimes, and the lowest seeds
    best = max(found, key=lambda each: len(each.regimes) * (len(each.seeds) - 1), default=None)
    return best if best and best.regimes else None


def compare_arms(rows: Mapping[str, Row]) -> list[tuple[str, str, Design, PairedDifference]]:
    """Compare all pairs of arms that share two seeds, with Holm's correction for all of them."""
    found = list(_pairs(rows))
    adjusted = holm([difference for *_, difference in found])
    return [(*each[:3], difference) for each, difference in zip(found, adjusted, strict=True)]


def _pairs(rows: Mapping[str, Row]) -> Iterator[tuple[str, str, Design, PairedDifference]]:
    for one, other in combinations(rows, 2):
        plan = design(rows[one], rows[other])
        if plan is None:
            continue
        gains = [plan.mean(rows[one], seed) - plan.mean(rows[other], seed) for seed in plan.seeds]
        value, low, high, p_value = mean_interval(gains)
        yield (
            one,
            other,
            plan,
            PairedDifference(
                first=Contender(label=LABELS[one], members=()),
                second=Contender(label=LABELS[other], members=()),
                value=value,
                low=low,
                high=high,
                p_value=p_value,
                num_pairs=len(gains),
                num_better=sum(gain > 0 for gain in gains),
                num_worse=sum(gain < 0 for gain in gains),
            ),
        )


def arms_table(file: Path, shown: Sequence[str] = ()) -> str:
    """Return the Markdown table of all comparisons of arms, and the arms that have none.

    With `shown` only their comparisons are in it; the correction is for all of them still.
    """
    rows = read_rows(file)
    unknown = [arm for arm in shown if arm not in rows]
    assert not unknown, f"{file} has no runs of {', '.join(unknown)}"
    head = ["first", "second", "regimes", "seeds", "first - second", "95% interval"]
    head += ["p (Holm)", "clear", "seeds ahead", "worst of first", "worst of second"]
    lines = [head, ["---", "---", *["---:"] * 5, *["---"] * 4]]
    compared = compare_arms(rows)
    for one, other, plan, found in compared:
        if shown and one not in shown and other not in shown:
            continue
        is_clear = found.outcome is not Outcome.UNCLEAR
        worst = [plan.worst(rows[arm]) for arm in (one, other)]
        lines.append(
            [
                LABELS[one],
                LABELS[other],
                str(len(plan.regimes)),
                ", ".join(map(str, plan.seeds)),
                f"{found.value:+.3f}",
                f"{found.low:+.3f} to {found.high:+.3f}",
                f"{found.adjusted_p:.3f}" if found.adjusted_p >= 0.001 else "below 0.001",
                "**yes**" if is_clear else "no",
                f"{found.num_better} of {found.num_pairs}",
                *(f"{value:.3f} ({REGIMES[regime]})" for regime, value in worst),
            ]
        )
    alone = [LABELS[arm] for arm in rows if all(arm not in pair[:2] for pair in compared)]
    text = markdown(lines)
    return f"{text}\n\nNo verdict, with one seed in common: {'; '.join(alone)}." if alone else text
