"""The curves of a study as CSV: with the columns of the paper's plots, and every step of every run.

A column of the paper is the name of an arm, or of a family, and a statistic of it: "p3o",
"grpo:mean", "grpo:std". An arm's mean and deviation are over its seeds; a family's are over its
members, each of which is the mean of its seeds. A regime has a file of its own, with those columns
whose arm it has.
"""

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trustbatch.studies.curves import (
    Points,
    deviation_curve,
    mean_curve,
    metric_points,
    pass_at_k_scores,
)
from trustbatch.studies.results import (
    CAP,
    ENTROPY,
    ONE_MINUS_ESS,
    REWARD,
    ArmResult,
    StudyResults,
    StudyRun,
)
from trustbatch.utils.files import write_atomically

CURVES = "curves"
ALL_RUNS = "all_runs.csv"
LONG_COLUMNS = {
    "reward": REWARD,
    "one_minus_ess": ONE_MINUS_ESS,
    "cap": CAP,
    "entropy": ENTROPY,
}
"""columns of the file with every run, and the metrics in them"""


def write_curves(results: StudyResults) -> list[Path]:
    """Write all CSV files of a study, and return their paths."""
    folder = results.folder / CURVES
    folder.mkdir(exist_ok=True)
    files = {ALL_RUNS: all_runs_csv(results)}
    for regime in results.regimes:
        arms = results.in_regime(regime)
        stem = file_stem(f"{results.name}-{regime}" if regime else results.name)
        for x_name, points, suffix in (
            ("step", reward_points, ""),
            ("k", pass_at_k_points, "-pass-at-k"),
        ):
            if table := paper_csv(arms, results.paper_columns, x_name, points):
                files[f"{stem}{suffix}.csv"] = table
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def file_stem(name: str) -> str:
    """Return a name that any file system takes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "regime"


def reward_points(run: StudyRun) -> Points:
    """Return the reward of every step."""
    return metric_points(run, REWARD)


def pass_at_k_points(run: StudyRun) -> Points:
    """Return pass@k, on average over the benchmarks."""
    last = run.scores[-1].name if run.scores else ""
    return {float(score.k): score.value for score in pass_at_k_scores(run, last)}


def all_runs_csv(results: StudyResults) -> str:
    """Return one line for every step of every run."""
    rows: list[Sequence[object]] = []
    for run in results.runs:
        columns = [metric_points(run, key) for key in LONG_COLUMNS.values()]
        for step in sorted(set().union(*columns)):
            values = [column.get(step, "") for column in columns]
            rows.append([run.arm.name, run.arm.regime, run.seed, f"{step:g}", *values])
    return _csv(["arm", "regime", "seed", "step", *LONG_COLUMNS], rows)


def paper_csv(
    arms: Sequence[ArmResult],
    columns: Mapping[str, str],
    x_name: str,
    points: Callable[[StudyRun], Points],
) -> str:
    """Return the paper's columns of one regime; nothing where none of them has any data."""
    found = {
        column: values
        for column, source in columns.items()
        if (values := _column(arms, source, points))
    }
    if not found:
        return ""
    places = sorted(set().union(*found.values()))
    rows = [[f"{x:g}", *(column.get(x, "") for column in found.values())] for x in places]
    return _csv([x_name, *found], rows)


def _column(arms: Sequence[ArmResult], source: str, points: Callable[[StudyRun], Points]) -> Points:
    name, _, statistic = source.partition(":")
    own = [arm for arm in arms if arm.plain_name == name]
    if own:
        curves = [points(run) for run in own[0].runs]
    else:
        members = [arm for arm in arms if arm.arm.family == name]
        curves = [mean_curve([points(run) for run in arm.runs]) for arm in members]
    return deviation_curve(curves) if statistic == "std" else mean_curve(curves)


def _csv(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return written.getvalue()
