"""The charts of the report: which metrics, how they are drawn, and how to read them."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from statistics import median

from trustbatch.observe.charts import (
    ChartSpec,
    Curve,
    Look,
    chart_data,
    chart_figure,
    clock_data,
    embedded_json,
)
from trustbatch.observe.report_data import Run
from trustbatch.training.lag_metrics import COMPLETIONS_BY_LAG, ONE_MINUS_ESS_BY_LAG

HINT = (
    "Strong lines are moving averages, faint lines or areas behind them the values as measured; of "
    "long runs a point stands for several steps, with their smallest and largest value around it."
)
QUANTILES = ("ratio/p01", "ratio/p10", "ratio/p50", "ratio/p90", "ratio/p99")
_RATIO_LIMITS = (1e-6, 1e6)


LEADING = (
    ChartSpec(
        "reward/mean",
        "Reward",
        "Mean reward of each step's batch.",
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
        "policy/loss",
        "Loss",
        "What the optimizer minimizes; in RL it need not fall, but a jump tells of a bad batch.",
    ),
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
        "learning_rate",
        "Learning rate",
        "Of the optimizer steps of each step, not smoothed.",
        scale="zero",
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

RATIO = ChartSpec(
    "ratio",
    "Ratio quantiles",
    "Ratio of trained to behavior probability per token: line = median, dark band = p10 to p90, "
    "light band = p01 to p99; a band close to the dashed 1 is on-policy.",
    scale="log",
    smoothed=False,
)


def charts_section(runs: Sequence[Run]) -> str:
    """Return the section with every chart that at least one run has data for."""
    absent: list[str] = []

    def drawn(specs: Sequence[ChartSpec], look: Look | None = None) -> str:
        figures: list[str] = []
        for spec in specs:
            curves = curves_of(spec, runs)
            if curves:
                figures.append(chart_figure(spec, curves, look))
            elif not spec.optional:
                absent.append(spec.title)
        return "\n".join(figures)

    evaluations = drawn((*evaluation_specs(runs), *part_specs(runs)))
    evaluated = f'<div class="charts panels">{evaluations}</div>\n' if evaluations else ""
    lead, panels = drawn(LEADING, Look(lead=True)), _ratio_figure(runs, absent)
    others = drawn(OTHERS)
    if any(max(run.by_lag(COMPLETIONS_BY_LAG), default=0) for run in runs):
        others += drawn([LAG]) + _lag_figures(runs)
    missing = (
        f'<p class="hint">Not recorded by any of these runs: {escape(", ".join(absent))}.</p>'
        if absent
        else ""
    )
    return (
        f'<section id="charts"><h2>Charts</h2>\n<p class="hint">{HINT}</p>{clocks_of(runs)}'
        f'<div class="charts lead">{lead}</div>\n{evaluated}{panels}\n'
        f'<div class="charts">{others}</div>{missing}</section>'
    )


def clocks_of(runs: Sequence[Run]) -> str:
    """Return when each run had trained on how many tokens, for charts over tokens and hours."""
    return embedded_json([clock_of(run) for run in runs], "clocks", "chart-clocks")


def clock_of(run: Run) -> dict[str, list[float]]:
    """Return the tokens and hours that a run had taken at some of its steps."""
    columns = [
        dict(zip(*run.series(key), strict=True)) for key in ("tokens/count", "time/step_seconds")
    ]
    steps = [float(row["step"]) for row in run.rows]
    tokens, seconds = ([column.get(step, 0.0) for step in steps] for column in columns)
    return clock_data(steps, tokens, seconds)


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
        ghost = _at(steps, run.series(spec.ghost)) if spec.ghost else []
        low, high = (run.series(key)[1] for key in spec.interval or ("", ""))
        has_band = len(low) == len(high) == len(steps)
        bands = [(low, high)] if has_band else []
        curves.append(Curve(index, run.name, steps, values, ghost, bands))
    return curves


def _at(steps: Sequence[float], series: tuple[list[float], list[float]]) -> list[float]:
    known = dict(zip(*series, strict=True))
    return [known.get(step, math.nan) for step in steps]


def lag_curves(
    runs: Sequence[Run], prefix: str, summary: Callable[[dict[int, list[float]]], list[float]]
) -> list[Curve]:
    """Return a curve over lags instead of steps for every run that recorded the metric."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        if by_lag := run.by_lag(prefix):
            lags = [float(lag) for lag in by_lag]
            curves.append(Curve(index, run.name, lags, summary(by_lag)))
    return curves


def _shares(by_lag: dict[int, list[float]]) -> list[float]:
    counts = [sum(values) for values in by_lag.values()]
    return [count / sum(counts) for count in counts]


def _medians(by_lag: dict[int, list[float]]) -> list[float]:
    return [median(values) for values in by_lag.values()]


def _lag_figures(runs: Sequence[Run]) -> str:
    look = Look(x="lag", marked=True, x_include=(0.0,))
    figures = ""
    for spec, summary in ((COMPLETIONS_BY_LAG_SPEC, _shares), (ESS_BY_LAG_SPEC, _medians)):
        if curves := lag_curves(runs, spec.key, summary):
            figures += chart_figure(spec, curves, look)
    return figures


def ratio_curves(runs: Sequence[Run]) -> list[Curve]:
    """Return the median ratio with bands of quantiles of every run that recorded all five."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        tables = [dict(zip(*run.series(key), strict=True)) for key in QUANTILES]
        steps = [step for step in tables[0] if all(step in table for table in tables)]
        p01, p10, p50, p90, p99 = ([table[step] for step in steps] for table in tables)
        if any(all(map(math.isfinite, row)) for row in zip(p01, p10, p50, p90, p99, strict=True)):
            curves.append(Curve(index, run.name, steps, p50, bands=[(p01, p99), (p10, p90)]))
    return curves


def run_charts(run: Run) -> list[tuple[ChartSpec, Curve, Look]]:
    """Return every chart over steps that a run has data for."""
    specs = (*LEADING, *evaluation_specs([run]), *part_specs([run]), *OTHERS, LAG)
    charts = [
        (spec, curve, Look(lead=spec in LEADING))
        for spec in specs
        for curve in curves_of(spec, [run])
    ]
    return charts + [
        (RATIO, curve, Look(level=1.0, limits=_RATIO_LIMITS)) for curve in ratio_curves([run])
    ]


def _ratio_figure(runs: Sequence[Run], absent: list[str]) -> str:
    curves = ratio_curves(runs)
    if not curves:
        absent.append(RATIO.title)
        return ""
    # all panels have the same axes, and the vertical one includes 1, the on-policy level
    values = [v for curve in curves for low, high in curve.bands for v in (*low, *high)]
    values = [value for value in values if math.isfinite(value)]
    steps = [step for curve in curves for step in curve.steps]
    look = Look(
        level=1.0,
        limits=_RATIO_LIMITS,
        x_include=(min(steps), max(steps)),
        y_include=(1.0, min(values), max(values)),
    )
    panels = "\n".join(
        '<div class="panel">'
        + embedded_json(
            chart_data(replace(RATIO, title=f"{RATIO.title} of {curve.label}"), [curve], look),
            "chart-data",
        )
        + "</div>"
        for curve in curves
    )
    return (
        '<figure class="card panels" data-metric="ratio"><figcaption>'
        f"<h3>{RATIO.title}</h3><p>{escape(RATIO.reading)}</p>"
        f'</figcaption><div class="multiples">{panels}</div></figure>'
    )
