"""The charts of the report: which metrics, how they are drawn, and how to read them."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from trustbatch.observe.charts import (
    COLORS,
    Axis,
    Band,
    Curve,
    Frame,
    band_chart,
    legend,
    line_chart,
    linear_axis,
    log_axis,
    smooth,
    step_axis,
)
from trustbatch.observe.report_data import Run
from trustbatch.training.lag_metrics import COMPLETIONS_BY_LAG, ONE_MINUS_ESS_BY_LAG

LEAD = Frame(620, 330)
SMALL = Frame(440, 250)
PANEL = Frame(320, 210)
HINT = (
    "Strong lines are moving averages over about a twentieth of a run, faint lines the raw values; "
    "a click on a name in a legend hides or shows that run."
)
QUANTILES = ("ratio/p01", "ratio/p10", "ratio/p50", "ratio/p90", "ratio/p99")
RATIO_LIMIT = 1e-6
_AUTO_LOG = 100.0


@dataclass(frozen=True)
class ChartSpec:
    """A chart of one metric over all runs.

    `scale` is "linear", "zero" (linear, from zero), "log" or "auto" (log where the data spans
    more than two decades).  A smoothed line has the raw values drawn faintly behind it, or the
    metric that `ghost` names.
    """

    key: str
    title: str
    reading: str
    scale: str = "linear"
    ghost: str = ""
    smoothed: bool = True
    interval: tuple[str, str] | None = None
    """metrics with the ends of an interval around the line"""
    optional: bool = False
    """not listed as missing where no run has it"""


LEADING = (
    ChartSpec(
        "reward/mean",
        "Reward",
        "Mean reward of each step's batch; the faint line is the raw value, the strong one a light "
        "moving average.",
    ),
    ChartSpec(
        "one_minus_ess",
        "1-ESS",
        "0 means every token is trusted alike; P3O's pull back to the data has exactly this "
        "strength.",
        scale="log",
    ),
)

OTHERS = (
    ChartSpec(
        "weight/cap",
        "Weight cap",
        "The largest weight a token may carry; a falling cap means that the batch is trusted less.",
        scale="auto",
    ),
    ChartSpec(
        "kl/behavior",
        "KL to the behavior policy",
        "How far the trained policy has moved from the one that sampled the data; near 0 means "
        "on-policy.",
    ),
    ChartSpec(
        "entropy",
        "Entropy",
        "Spread of the next-token distribution; a fall to 0 means that exploration has ended.",
        scale="zero",
    ),
    ChartSpec(
        "gradient/norm",
        "Gradient norm",
        "Length of the gradient before clipping, not smoothed; isolated spikes point at single bad "
        "batches.",
        scale="auto",
        smoothed=False,
    ),
    ChartSpec(
        "response/length_mean",
        "Response length",
        "Tokens per response: the strong line is the mean, the faint one the longest of the step.",
        scale="zero",
        ghost="response/length_max",
    ),
    ChartSpec(
        "response/truncated_fraction",
        "Truncated responses",
        "Share of responses that were cut off at the length limit before they ended.",
        scale="zero",
    ),
    ChartSpec(
        "episode/turns_mean",
        "Turns",
        "The policy's turns in an episode: the strong line is the mean, the faint one the most of "
        "the step.",
        scale="zero",
        ghost="episode/turns_max",
        optional=True,
    ),
    ChartSpec(
        "ratio/clipped_fraction",
        "Clipped tokens",
        "Share of tokens whose ratio left the clip range and so gave no gradient.",
        scale="zero",
    ),
    ChartSpec(
        "ratio/capped_fraction",
        "Capped tokens",
        "Share of tokens whose weight was cut down to the cap.",
        scale="zero",
    ),
    ChartSpec(
        "dynamic/groups_missing",
        "Groups missing",
        "Batch slots that dynamic sampling had to fill with groups of equal rewards.",
        "zero",
        smoothed=False,
        optional=True,
    ),
    ChartSpec(
        "reward/equal_groups_fraction",
        "Groups without a signal",
        "Share of prompts whose responses all have the same reward and so give no gradient.",
        scale="zero",
    ),
    ChartSpec(
        "time/tokens_per_second",
        "Tokens per second",
        "Tokens of a step over its whole duration, generation and training together.",
        scale="zero",
    ),
    ChartSpec(
        "time/trainer_busy_share",
        "Trainer busy",
        "Share of a step in which the trainer trained; the rest it waited for completions.",
        scale="zero",
        optional=True,
    ),
    ChartSpec(
        "time/generation_busy_share",
        "Engines busy",
        "Share of a step in which completions were sampled; the two shares add up to more than "
        "1 where generation and training overlap.",
        scale="zero",
        optional=True,
    ),
    ChartSpec(
        "cluster/buffered_batches",
        "Batches waiting",
        "Graded batches that wait for the trainer: always 0 means that it waits for them, always "
        "full that the engines do.",
        scale="zero",
        optional=True,
    ),
)

LAG = ChartSpec(
    "rollout/lag_mean",
    "Lag",
    "Versions between the policy and the one that sampled the batch, mean over completions.",
    scale="zero",
    smoothed=False,
)
COMPLETIONS_BY_LAG_SPEC = ChartSpec(
    COMPLETIONS_BY_LAG,
    "Completions by lag",
    "Share of all completions trained on, by their age in versions.",
    scale="zero",
    smoothed=False,
)
ESS_BY_LAG_SPEC = ChartSpec(
    ONE_MINUS_ESS_BY_LAG,
    "1-ESS by lag",
    "1-ESS of the completions by their age in versions, median over the steps that had some; "
    "a lag that only the first steps had says little.",
    scale="log",
    smoothed=False,
)

EVALUATION = re.compile(r"eval/(.+)/pass@1")
REWARD_PART = re.compile(r"reward/(.+)/mean")
TASK_PART = re.compile(r"task/(.+)/reward")

RATIO_TITLE = "Ratio quantiles"
RATIO_READING = (
    "Ratio of trained to behavior probability per token, log axis shared by all runs: line = "
    "median, dark band = p10 to p90, light band = p01 to p99; a band close to the dashed 1 is "
    "on-policy."
)


def charts_section(runs: Sequence[Run]) -> str:
    """Return the section with every chart that at least one run has data for."""
    x_steps = [float(row["step"]) for run in runs for row in run.rows]
    absent: list[str] = []

    def drawn(specs: Sequence[ChartSpec], frame: Frame) -> str:
        figures: list[str] = []
        for spec in specs:
            curves = curves_of(spec, runs)
            if curves:
                figures.append(chart_figure(spec, curves, step_axis(x_steps), frame))
            elif not spec.optional:
                absent.append(spec.title)
        return "\n".join(figures)

    evaluations = drawn((*evaluation_specs(runs), *part_specs(runs)), SMALL)
    evaluated = f'<div class="charts panels">{evaluations}</div>\n' if evaluations else ""
    lead, panels = drawn(LEADING, LEAD), _ratio_figure(runs, step_axis(x_steps, parts=4), absent)
    others = drawn(OTHERS, SMALL)
    if any(max(run.by_lag(COMPLETIONS_BY_LAG), default=0) for run in runs):
        others += drawn([LAG], SMALL) + _lag_figures(runs)
    missing = (
        f'<p class="hint">Not recorded by any of these runs: {escape(", ".join(absent))}.</p>'
        if absent
        else ""
    )
    return (
        f'<section id="charts"><h2>Charts</h2>\n<p class="hint">{HINT}</p>'
        f'<div class="charts lead">{lead}</div>\n{evaluated}{panels}\n'
        f'<div class="charts">{others}</div>{missing}</section>'
    )


def evaluation_specs(runs: Sequence[Run]) -> list[ChartSpec]:
    """Return a chart for every task that any of the runs was evaluated on."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key in row)
    return [
        ChartSpec(
            key,
            f"{found[1]}: pass@1",
            "Share of correct samples in an evaluation during the run, not smoothed; the band is "
            "the 95% interval over its problems.",
            smoothed=False,
            interval=(f"{key}_low", f"{key}_high"),
        )
        for key in keys
        if (found := EVALUATION.fullmatch(key))
    ]


def part_specs(runs: Sequence[Run]) -> list[ChartSpec]:
    """Return a chart for every part of a reward or of a mixture of tasks."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key in row)
    readings = {
        REWARD_PART: "Mean of this part of the reward in each step's batch, before its weight.",
        TASK_PART: "Mean reward of this task's completions in each step's batch.",
    }
    return [
        ChartSpec(key, f"{found[1]}: reward", reading)
        for pattern, reading in readings.items()
        for key in keys
        if (found := pattern.fullmatch(key))
    ]


def curves_of(spec: ChartSpec, runs: Sequence[Run]) -> list[Curve]:
    """Return a curve for every run that recorded at least one finite value of the metric."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        steps, values = run.series(spec.key)
        if not any(map(math.isfinite, values)):
            continue
        ghost = run.series(spec.ghost or spec.key) if spec.smoothed else ([], [])
        line = smooth(values) if spec.smoothed else values
        low, high = (run.series(key)[1] for key in spec.interval or ("", ""))
        if len(low) != len(steps) or len(high) != len(steps):
            low, high = [], []
        curves.append(Curve(index, run.name, steps, line, *ghost, low, high))
    return curves


def lag_curves(
    runs: Sequence[Run], prefix: str, summary: Callable[[dict[int, list[float]]], list[float]]
) -> list[Curve]:
    """Return a curve over lags instead of steps for every run that recorded the metric."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        if by_lag := run.by_lag(prefix):
            lags = [float(lag) for lag in by_lag]
            curves.append(Curve(index, run.name, lags, summary(by_lag), marked=True))
    return curves


def _shares(by_lag: dict[int, list[float]]) -> list[float]:
    counts = [sum(values) for values in by_lag.values()]
    return [count / sum(counts) for count in counts]


def _medians(by_lag: dict[int, list[float]]) -> list[float]:
    return [median(values) for values in by_lag.values()]


def _lag_figures(runs: Sequence[Run]) -> str:
    figures = ""
    for spec, summary in ((COMPLETIONS_BY_LAG_SPEC, _shares), (ESS_BY_LAG_SPEC, _medians)):
        if curves := lag_curves(runs, spec.key, summary):
            lags = [lag for curve in curves for lag in curve.steps]
            figures += chart_figure(spec, curves, step_axis([0.0, *lags], name="lag"), SMALL)
    return figures


def value_axis(spec: ChartSpec, curves: Sequence[Curve]) -> Axis:
    """Return the vertical axis that holds every line of a chart."""
    values = [
        value
        for curve in curves
        for value in (*curve.values, *curve.ghost, *curve.low, *curve.high)
    ]
    finite = [value for value in values if math.isfinite(value)]
    wide = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > _AUTO_LOG
    if spec.scale == "log" or (spec.scale == "auto" and wide):
        return log_axis(finite)
    return linear_axis(finite, zero=spec.scale == "zero")


def bands_of(runs: Sequence[Run]) -> list[Band]:
    """Return the ratio quantiles of every run that recorded all five of them."""
    bands: list[Band] = []
    for index, run in enumerate(runs):
        tables = [dict(zip(*run.series(key), strict=True)) for key in QUANTILES]
        steps = [step for step in tables[0] if all(step in table for table in tables)]
        quantiles = [[table[step] for step in steps] for table in tables]
        if any(all(map(math.isfinite, row)) for row in zip(*quantiles, strict=True)):
            bands.append(Band(index, run.name, steps, quantiles))
    return bands


def chart_figure(
    spec: ChartSpec, curves: Sequence[Curve], x: Axis, frame: Frame, y: Axis | None = None
) -> str:
    """Return a chart with its title, how to read it, and its legend; its axis fits its curves."""
    y = y or value_axis(spec, curves)
    scale = " <small>log axis</small>" if y.log else ""
    entries = [(curve.run, curve.label) for curve in curves]
    names = legend(entries, fold=frame is not LEAD)
    crowd = " crowd" if len(curves) > COLORS else ""
    hover = ' data-hover="moving average"' if spec.smoothed else ""
    return (
        f'<figure class="card{crowd}" data-metric="{escape(spec.key)}"{hover}>'
        f"<figcaption><h3>{escape(spec.title)}{scale}</h3>"
        f"<p>{escape(spec.reading)}</p></figcaption>"
        f"{line_chart(curves, x, y, frame, spec.title)}{names}</figure>"
    )


def _ratio_figure(runs: Sequence[Run], x: Axis, absent: list[str]) -> str:
    bands = bands_of(runs)
    if not bands:
        absent.append(RATIO_TITLE)
        return ""
    # The axis always includes 1, the on-policy level.
    values = [1.0, *(value for band in bands for curve in band.quantiles for value in curve)]
    y = log_axis(values, floor=RATIO_LIMIT, ceiling=1 / RATIO_LIMIT)
    panels = "\n".join(
        f'<div class="panel" data-run="{band.run}">{legend([(band.run, band.label)])}'
        f"{band_chart(band, x, y, PANEL, f'{RATIO_TITLE} of {band.label}')}</div>"
        for band in bands
    )
    return (
        '<figure class="card panels" data-metric="ratio"><figcaption>'
        f"<h3>{RATIO_TITLE} <small>log axis</small></h3><p>{escape(RATIO_READING)}</p>"
        f'</figcaption><div class="multiples">{panels}</div></figure>'
    )
