"""The charts of a study: one color per arm in all regimes, and bands over its seeds."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from trustbatch.evaluation.report import PASS_AT_K_READING
from trustbatch.evaluation.results import AVERAGE
from trustbatch.observe.charts import ChartSpec, Curve, Look, chart_figure
from trustbatch.studies.comparisons import Contender, contenders
from trustbatch.studies.curves import (
    Points,
    around,
    deviation_curve,
    mean_curve,
    metric_points,
    pass_at_k_scores,
    range_curves,
)
from trustbatch.studies.results import (
    CAP,
    ENTROPY,
    ONE_MINUS_ESS,
    REWARD,
    RunState,
    StudyResults,
    StudyRun,
    reward_bounds,
)

SUBJECT_COLOR = 1
"""red, as in the paper; the first of the others is blue"""
BAND_READING = (
    "The line is the mean, a moving average; the band is one standard deviation over seeds, or "
    "over arms for a mean of several arms, cut at 0 and 1 where all rewards lie between them."
)
PASS_AT_K_OVER_SEEDS = (
    "The probability that at least one of k samples is right; the band is one standard deviation "
    "over seeds."
)
DISTRUST = ChartSpec(
    ONE_MINUS_ESS,
    "1-ESS",
    "How far off-policy the data was: 0 means that all tokens have equal weight. Mean, lowest and "
    "highest seed.",
    scale="log",
)
CAPS = ChartSpec(
    CAP,
    "Weight cap",
    "The largest weight of a token, for objectives that have a cap. Mean, lowest and highest seed.",
    scale="auto",
)
ENTROPIES = ChartSpec(
    ENTROPY,
    "Entropy",
    "Of the policy, in nats per token. A drift of data and policy together shows here while 1-ESS "
    "stays small. Mean, lowest and highest seed.",
    scale="auto",
)


@dataclass(frozen=True)
class Colors:
    """Numbers of curves, which select their colors and their legend entries."""

    of_arm: dict[str, int]
    """by name without the regime"""
    of_family: dict[str, int]

    @classmethod
    def of(cls, results: StudyResults) -> "Colors":
        """Number the curves: the subject has a fixed color, then families, arms and members."""
        families = dict.fromkeys(
            each.members[0].arm.family
            for regime in results.regimes
            for each in contenders(results.in_regime(regime))
            if len(each.members) > 1
        )
        alone = dict.fromkeys(a.plain_name for a in results.arms if a.arm.family not in families)
        members = dict.fromkeys(a.plain_name for a in results.arms if a.arm.family in families)
        numbers = (number for number in count() if number != SUBJECT_COLOR)
        of_family = {family: next(numbers) for family in families}
        of_arm = {
            name: SUBJECT_COLOR if name == results.subject else next(numbers)
            for name in (*alone, *members)
        }
        return cls(of_arm=of_arm, of_family=of_family)

    def number(self, contender: Contender) -> int:
        """Return the number of an arm's or a family's curve."""
        first = contender.members[0]
        if len(contender.members) > 1:
            return self.of_family[first.arm.family]
        return self.of_arm[first.plain_name]


def reward_figures(results: StudyResults, colors: Colors) -> str:
    """Return the reward charts of each regime, with families as one curve and by member."""
    spec = ChartSpec(REWARD, "", "")
    bounds = reward_bounds(results.runs)
    groups: list[tuple[str, list[Curve]]] = []
    for regime, label in results.regimes.items():
        rivals = contenders(results.in_regime(regime))
        together = curves_of(rivals, colors, REWARD, bounds)
        groups.append((_title("Reward", label), together))
        if any(len(each.members) > 1 for each in rivals):
            apart = [Contender.of(arm) for each in rivals for arm in each.members]
            each_arm = curves_of(apart, colors, REWARD, bounds)
            groups.append((_title("Reward of every arm", label), each_arm))
    look = _shared_axes([curve for _, curves in groups for curve in curves], lead=True)
    return "\n".join(
        chart_figure(replace(spec, title=title), curves, look) for title, curves in groups if curves
    )


def trust_figures(results: StudyResults, colors: Colors) -> str:
    """Return charts of 1-ESS, weight caps and entropies of every arm, by regime."""
    figures = []
    for spec in (DISTRUST, CAPS, ENTROPIES):
        groups = {
            label: curves_of(map(Contender.of, results.in_regime(regime)), colors, spec.key)
            for regime, label in results.regimes.items()
        }
        look = _shared_axes([curve for curves in groups.values() for curve in curves])
        figures += [
            chart_figure(replace(spec, title=_title(spec.title, label)), curves, look)
            for label, curves in groups.items()
            if curves
        ]
    return "\n".join(figures)


def pass_at_k_figures(results: StudyResults, colors: Colors) -> str:
    """Return a chart of pass@k for the average and for each benchmark."""
    tasks = list(dict.fromkeys(score.name for run in results.runs for score in run.scores))
    tasks.sort(key=lambda task: task != AVERAGE)
    reading = PASS_AT_K_OVER_SEEDS if len(results.seeds) > 1 else PASS_AT_K_READING
    figures = []
    for regime, label in results.regimes.items():
        rivals = contenders(results.in_regime(regime))
        for task in tasks:
            curves = [
                curve
                for each in rivals
                if (curve := _pass_at_k_curve(each, colors.number(each), task))
            ]
            if curves:
                spec = ChartSpec("pass@k", _title(task, label), reading, "zero", smoothed=False)
                figures.append(chart_figure(spec, curves, Look(x="k", lead=True)))
    return "\n".join(figures)


def curves_of(
    rivals: Iterable[Contender],
    colors: Colors,
    key: str,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> list[Curve]:
    """Return a curve with its band for every contender that recorded the metric."""
    # mean minus deviation may be below zero, which a log axis can't show
    is_range = key != REWARD
    curves = [
        _curve(each, colors.number(each), lambda run: metric_points(run, key), is_range)
        for each in rivals
    ]
    return [_within(curve, bounds) for curve in curves if curve]


def _within(curve: Curve, bounds: tuple[float, float]) -> Curve:
    """Cut the bands of a curve: a deviation reaches beyond the bounds, a reward does not."""
    bands = [
        ([max(value, bounds[0]) for value in low], [min(value, bounds[1]) for value in high])
        for low, high in curve.bands
    ]
    return replace(curve, bands=bands)


def _curve(
    contender: Contender,
    number: int,
    points: Callable[[StudyRun], Points],
    is_range: bool = False,
) -> Curve | None:
    """Return the mean over seeds or members, with one deviation or the range as its band."""
    by_member = [[points(run) for run in member.runs] for member in contender.members]
    parts = by_member[0] if len(by_member) == 1 else [mean_curve(runs) for runs in by_member]
    mean = mean_curve(parts)
    if not mean:
        return None
    low, high = range_curves(parts) if is_range else around(mean, deviation_curve(parts))
    ends = [[end.get(x, mean[x]) for x in mean] for end in (low, high)]
    return Curve(
        number,
        _label(contender),
        list(mean),
        list(mean.values()),
        bands=[(ends[0], ends[1])] if low else (),
    )


def _pass_at_k_curve(contender: Contender, number: int, task: str) -> Curve | None:
    curve = _curve(
        contender,
        number,
        lambda run: {float(score.k): score.value for score in pass_at_k_scores(run, task)},
    )
    if curve is None or len(contender.runs) > 1:
        return curve and _within(curve, (0.0, 1.0))
    scores = pass_at_k_scores(contender.runs[0], task)
    return replace(curve, bands=[([s.low for s in scores], [s.high for s in scores])])


def _label(contender: Contender) -> str:
    runs = contender.runs
    done = sum(run.state is RunState.FINISHED for run in runs)
    if done == len(runs):
        return contender.label
    return f"{contender.label} ({done} of {len(runs)} finished)"


def _title(what: str, regime_label: str) -> str:
    return f"{what}: {regime_label}" if regime_label else what


def _shared_axes(curves: Sequence[Curve], *, lead: bool = False) -> Look:
    """Return one scale for all regimes, so that they can be compared."""
    steps = [step for curve in curves for step in curve.steps]
    values = [value for curve in curves for value in curve.values]
    values += [value for curve in curves for band in curve.bands for end in band for value in end]
    if not steps:
        return Look(lead=lead)
    return Look(
        lead=lead,
        x_include=(min(steps), max(steps)),
        y_include=(min(values), max(values)),
    )
