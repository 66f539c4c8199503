"""Curves of a study: the mean of several, and how far they spread around it."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from trustbatch.evaluation.results import Score
from trustbatch.studies.results import StudyRun

Points = Mapping[float, float]
"""a curve: values by step, or by k"""


def metric_points(run: StudyRun, key: str) -> Points:
    """Return the finite values of a metric by step."""
    return dict(zip(*run.series(key), strict=True))


def pass_at_k_scores(run: StudyRun, task: str) -> Sequence[Score]:
    """Return pass@k of a benchmark, or of their average; none where it was not evaluated."""
    return next((each.pass_at_k for each in run.scores if each.name == task), ())


def mean_curve(curves: Sequence[Points]) -> Points:
    """Return the mean of those curves that have a point, at every point that any has."""
    return {x: fmean(values) for x, values in _by_place(curves).items()}


def deviation_curve(curves: Sequence[Points]) -> Points:
    """Return the standard deviation (of a sample) wherever two curves have a point."""
    return {x: stdev(values) for x, values in _by_place(curves).items() if len(values) > 1}


def range_curves(curves: Sequence[Points]) -> tuple[Points, Points]:
    """Return the lowest and the highest of the curves, wherever two of them have a point."""
    places = {x: values for x, values in _by_place(curves).items() if len(values) > 1}
    lowest = {x: min(values) for x, values in places.items()}
    return lowest, {x: max(values) for x, values in places.items()}


def around(mean: Points, deviation: Points) -> tuple[Points, Points]:
    """Return the curves one deviation below and above the mean."""
    return (
        {x: mean[x] - each for x, each in deviation.items()},
        {x: mean[x] + each for x, each in deviation.items()},
    )


def _by_place(curves: Sequence[Points]) -> dict[float, list[float]]:
    places = sorted(set().union(*curves))
    return {x: [curve[x] for curve in curves if x in curve] for x in places}
