"""What the page and the summary of a study say of an arm, in cells."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trustbatch.observe.page_parts import DASH
from trustbatch.studies.comparisons import PairedDifference, mean_interval
from trustbatch.studies.results import (
    BENCHMARKS,
    BEST_REWARD,
    FINAL_DISTRUST,
    FINAL_REWARD,
    HELD_OUT,
    PEAK_DISTRUST,
    ArmResult,
    Measure,
    RunState,
    Spread,
)
from trustbatch.studies.verdict import plain, signed, small

PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class Column:
    """A heading, and what an arm has under it."""

    heading: str
    cells: Sequence[str]


def arm_columns(arms: Sequence[ArmResult]) -> list[Column]:
    """Return the numbers of some arms: only columns in which any of them has something."""
    columns = [
        Column("Runs finished", [finished(arm) for arm in arms]),
        Column("Final reward", [_written(arm.spread(FINAL_REWARD)) for arm in arms]),
        Column("Best reward", [_written(arm.spread(BEST_REWARD)) for arm in arms]),
        Column("Held-out reward (95% interval)", [held_out(arm) for arm in arms]),
        *_benchmark_columns(arms),
        Column("Collapse at step", [collapse(arm) for arm in arms]),
        Column("Final 1-ESS", [_distrust(arm, FINAL_DISTRUST) for arm in arms]),
        Column("Highest 1-ESS", [_distrust(arm, PEAK_DISTRUST) for arm in arms]),
    ]
    return [column for column in columns if any(cell != DASH for cell in column.cells)]


def difference_columns(
    differences: Sequence[PairedDifference],
) -> list[Column]:
    """Return the comparisons that the verdict rests on."""
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


def finished(arm: ArmResult) -> str:
    """Say how many seeds are done, and what became of the others."""
    done = f"{len(arm.in_state(RunState.FINISHED))} of {len(arm.runs)}"
    others = [
        f"{len(found)} {state.value}"
        for state in (RunState.FAILED, RunState.UNFINISHED, RunState.MISSING)
        if (found := arm.in_state(state))
    ]
    return ", ".join([done, *others])


def held_out(arm: ArmResult) -> str:
    """Return the mean on held-out prompts, with an interval over seeds, or prompts of the one."""
    values = list(arm.by_seed(HELD_OUT).values())
    if not values:
        return DASH
    if len(values) > 1:
        value, low, high, _ = mean_interval(values)
        return f"{plain(value)} ({plain(low)} to {plain(high)})"
    (only,) = [run.held_out for run in arm.runs if run.held_out]
    if not math.isfinite(only.low):
        return plain(only.mean)
    return f"{plain(only.mean)} ({plain(only.low)} to {plain(only.high)})"


def collapse(arm: ArmResult) -> str:
    """Return the steps at which seeds collapsed."""
    steps = [str(run.collapse_step) for run in arm.collapsed]
    if not steps:
        return DASH
    share = f" ({len(steps)} of {len(arm.runs)})" if len(arm.runs) > 1 else ""
    return f"{', '.join(steps)}{share}"


def _benchmark_columns(arms: Sequence[ArmResult]) -> list[Column]:
    runs = [run for arm in arms for run in arm.runs]
    tasks = dict.fromkeys(score.name for run in runs for score in run.scores)
    return [
        Column(f"{task}: {BENCHMARKS.name}", [_benchmark(arm, task) for arm in arms])
        for task in tasks
    ]


def _benchmark(arm: ArmResult, task: str) -> str:
    found = [
        score
        for run in arm.runs
        for scores in run.scores
        if scores.name == task and (score := scores.at(1))
    ]
    if len(found) == 1:
        return f"{plain(found[0].value)} ({plain(found[0].low)} to {plain(found[0].high)})"
    return _written(Spread.of([score.value for score in found]))


def _written(spread: Spread | None) -> str:
    if spread is None:
        return DASH
    if spread.deviation is None:
        return plain(spread.mean)
    return f"{plain(spread.mean)} {PLUS_MINUS} {plain(spread.deviation)}"


def _distrust(arm: ArmResult, measure: Measure) -> str:
    spread = arm.spread(measure)
    return small(spread.mean) if spread else DASH


def _interval(each: PairedDifference) -> str:
    return f"{signed(each.low)} to {signed(each.high)}" if each.has_interval else DASH


def _ahead(each: PairedDifference) -> str:
    if each.unit != "seed":
        return DASH
    return f"{each.num_better} of {each.num_pairs} seeds"


def _p(value: float, each: PairedDifference) -> str:
    return small(value) if each.has_interval else DASH
