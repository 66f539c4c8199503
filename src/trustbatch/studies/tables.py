"""The tables of a study: cells for its page, and its summary in Markdown."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from trustbatch.evaluation.report import cell, markdown_table
from trustbatch.objectives import OBJECTIVES, Objective
from trustbatch.observe.page_parts import DASH
from trustbatch.studies.comparisons import Contender, PairedDifference, mean_interval, table_rows
from trustbatch.studies.curves import pass_at_k_scores
from trustbatch.studies.results import (
    BENCHMARKS,
    BEST_REWARD,
    FINAL_DISTRUST,
    FINAL_REWARD,
    HELD_OUT,
    PEAK_DISTRUST,
    Measure,
    RunState,
    Spread,
    StudyResults,
    StudyRun,
    reward_bounds,
)
from trustbatch.studies.verdict import StudyVerdict, plain, signed, small

PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class Column:
    """A heading, and a cell per row."""

    heading: str
    cells: Sequence[str]


def arm_columns(rows: Sequence[Contender]) -> list[Column]:
    """Return the numbers of arms and families, without columns that are empty for all."""
    columns = [
        Column("Runs finished", [finished(row.runs) for row in rows]),
        Column("Final reward", [_written(row.spread(FINAL_REWARD)) for row in rows]),
        Column("Best reward", [_written(row.spread(BEST_REWARD)) for row in rows]),
        Column("Held-out reward (95% interval)", [held_out(row) for row in rows]),
        *_benchmark_columns(rows),
        Column("Collapse at step", [collapse(row) for row in rows]),
        Column("Final 1-ESS", [_distrust(row, FINAL_DISTRUST) for row in rows]),
        Column("Highest 1-ESS", [_distrust(row, PEAK_DISTRUST) for row in rows]),
    ]
    return [column for column in columns if any(cell != DASH for cell in column.cells)]


def difference_columns(
    differences: Sequence[PairedDifference],
) -> list[Column]:
    """Return the comparisons behind the verdict."""
    columns = [
        Column("Regime", [each.first.regime_label or DASH for each in differences]),
        Column("Arm", [each.first.label for each in differences]),
        Column("Compared with", [each.second.label for each in differences]),
        Column("Difference", [signed(each.value) for each in differences]),
        Column("95% interval", [_interval(each) for each in differences]),
        Column("Higher", [_ahead(each) for each in differences]),
        Column("p", [_p(each.p_value, each) for each in differences]),
        Column("p (Holm)", [_p(each.adjusted_p, each) for each in differences]),
        Column("Outcome", [each.outcome.value for each in differences]),
    ]
    return [column for column in columns if any(cell != DASH for cell in column.cells)]


def finished(runs: Sequence[StudyRun]) -> str:
    """Return how many runs have finished, and the states of the others."""
    counts = Counter(run.state for run in runs)
    others = [
        f"{counts[state]} {state.value}"
        for state in (RunState.FAILED, RunState.UNFINISHED, RunState.MISSING)
        if counts[state]
    ]
    return ", ".join([f"{counts[RunState.FINISHED]} of {len(runs)}", *others])


def held_out(row: Contender) -> str:
    """Return the held-out reward with an interval over seeds, or over prompts for one seed."""
    if len(row.members) > 1:
        return _written(row.spread(HELD_OUT))
    found = [run.held_out for run in row.runs if run.held_out]
    if not found:
        return DASH
    value, low, high = found[0].mean, found[0].low, found[0].high
    if len(found) > 1:
        value, low, high, _ = mean_interval([each.mean for each in found])
    lowest, highest = reward_bounds(row.runs)
    return _with_interval(value, max(low, lowest), min(high, highest))


def collapse(row: Contender) -> str:
    """Return the steps at which runs collapsed."""
    steps = sorted(run.collapse_step for run in row.runs if run.collapse_step is not None)
    if not steps:
        return DASH
    share = f" ({len(steps)} of {len(row.runs)})" if len(row.runs) > 1 else ""
    return f"{', '.join(map(str, dict.fromkeys(steps)))}{share}"


def _benchmark_columns(rows: Sequence[Contender]) -> list[Column]:
    tasks = dict.fromkeys(score.name for row in rows for run in row.runs for score in run.scores)
    return [
        Column(f"{task}: {BENCHMARKS.name}", [_benchmark(row, task) for row in rows])
        for task in tasks
    ]


def _benchmark(row: Contender, task: str) -> str:
    by_member = [
        [scores[0] for run in member.runs if (scores := pass_at_k_scores(run, task))]
        for member in row.members
    ]
    known = [found for found in by_member if found]
    if len(known) > 1:
        return _written(Spread.of([fmean(score.value for score in found) for found in known]))
    found = known[0] if known else []
    if len(found) == 1:
        return _with_interval(found[0].value, found[0].low, found[0].high)
    return _written(Spread.of([score.value for score in found]))


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{plain(value)} ({plain(low)} to {plain(high)})" if math.isfinite(low) else plain(value)


def _written(spread: Spread | None) -> str:
    if spread is None:
        return DASH
    if spread.deviation is None:
        return plain(spread.mean)
    return f"{plain(spread.mean)} {PLUS_MINUS} {plain(spread.deviation)}"


def _distrust(row: Contender, measure: Measure) -> str:
    spread = row.spread(measure)
    return small(spread.mean) if spread else DASH


def _interval(each: PairedDifference) -> str:
    return f"{signed(each.low)} to {signed(each.high)}" if each.has_interval else DASH


def _ahead(each: PairedDifference) -> str:
    if each.unit != "seed":
        return DASH
    return f"{each.num_better} of {each.num_pairs} seeds"


def _p(value: float, each: PairedDifference) -> str:
    return small(value) if each.has_interval else DASH


def hyper_parameters(objective: str) -> list[str] | None:
    """Return the names of an objective's own numeric options; None for an unknown objective.

    Options that all objectives have (entropy and reference KL, off by default) and choices between
    estimators don't count.
    """
    if objective not in OBJECTIVES:
        return None
    shared = {field.name for field in fields(Objective)}
    return [
        field.name
        for field in fields(OBJECTIVES[objective])
        if field.name not in shared and isinstance(field.default, int | float)
    ]


SUMMARY_FILE = "summary.md"


def study_summary(results: StudyResults, verdict: StudyVerdict) -> str:
    """Return the summary: question, command, table and verdict; no paths but the command's."""
    rows = [row for regime in results.regimes for row in table_rows(results.in_regime(regime))]
    names = [Column("Arm", [row.label for row in rows])]
    if len(results.regimes) > 1:
        names.insert(0, Column("Regime", [row.regime_label for row in rows]))
    columns = [*names, *arm_columns(rows)]
    headings = [cell(column.heading) for column in columns]
    cells = [[cell(column.cells[place]) for column in columns] for place in range(len(rows))]
    seeds = ", ".join(map(str, results.seeds))
    lines = [
        cell(results.question),
        "",
        f"    {' '.join(results.command.split())}",
        "",
        *markdown_table(headings, cells, num_words=len(names)),
        "",
        f"Scale {cell(results.scale)}; seeds {seeds}; means and, behind \N{PLUS-MINUS SIGN}, "
        "standard deviations over seeds, of a mean of several arms over these.",
        "",
        f"**{cell(verdict.sentences[0])}** {cell(verdict.sentences[1])}",
    ]
    if verdict.remarks:
        lines += ["", *(f"- {cell(remark)}" for remark in verdict.remarks)]
    return "\n".join(lines) + "\n"
