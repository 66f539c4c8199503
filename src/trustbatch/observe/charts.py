"""Line charts as data: what the page's script draws from (`charts.js`), as JSON in the page.

Colors and dashes are classes (`c0`..`c7`, `d0`..`d2`) that the page's stylesheet resolves, so that
one drawing works in the light and the dark theme.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

COLORS = 8
DASHES = 3
POINTS_PER_CHART = 5000
"""of all lines together; with more, a point stands for several steps"""
MIN_POINTS, MAX_POINTS = 200, 800
"""of a line, however many there are"""
MAX_CLOCK_POINTS = 200
_DIGITS = 6

Values = Sequence[float]
Scale = Literal["linear", "zero", "log", "auto"]


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
    scale: Scale = "linear"
    ghost: str = ""
    smoothed: bool = True
    interval: tuple[str, str] | None = None
    """metrics with the ends of an interval around the line"""
    optional: bool = False
    """not listed as missing where no run has it"""


@dataclass(frozen=True)
class Curve:
    """One line; NaN leaves a gap, and `ghost` is drawn faintly behind it.

    `ghost` and both ends of every band around the line are as long as `steps`.
    """

    line: int
    """its color, and what a click in a legend switches in all charts"""
    label: str
    steps: Values
    values: Values
    ghost: Values = ()
    bands: Sequence[tuple[Values, Values]] = ()
    run: int | None = None
    """whose clock it has; default: that of the run with the number of its line"""


@dataclass(frozen=True)
class Look:
    """How a chart differs from one over steps in a grid of small ones."""

    x: Literal["step", "lag", "k"] = "step"
    lead: bool = False
    """larger, and its legend is never folded"""
    marked: bool = False
    """has a dot on every point"""
    level: float | None = None
    """a dashed line across"""
    limits: tuple[float, float] | None = None
    """beyond which a logarithmic axis does not go"""
    x_include: Values = ()
    y_include: Values = ()
    """values that the axes hold besides the data"""
    unfiltered: bool = False
    """the box that searches runs does not concern it"""


def chart_figure(spec: ChartSpec, curves: Sequence[Curve], look: Look | None = None) -> str:
    """Return a chart with its title and how to read it; the page's script draws it."""
    data = embedded_json(chart_data(spec, curves, look), "chart-data")
    reading = f"<p>{escape(spec.reading)}</p>" if spec.reading else ""
    return (
        f'<figure class="card" data-metric="{escape(spec.key)}">'
        f"<figcaption><h3>{escape(spec.title)}</h3>{reading}</figcaption>{data}</figure>"
    )


def chart_data(
    spec: ChartSpec, curves: Sequence[Curve], look: Look | None = None
) -> dict[str, Any]:
    """Return what the script draws a chart from."""
    look = look or Look()
    limit = max(MIN_POINTS, min(MAX_POINTS, POINTS_PER_CHART // max(len(curves), 1)))
    more = {
        key: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in vars(look).items()
        if value not in (None, False, ())
    }
    return {
        "key": spec.key,
        "title": spec.title,
        "scale": spec.scale,
        "smoothed": spec.smoothed,
        **more,
        "series": [series_data(curve, limit) for curve in curves],
    }


def series_data(curve: Curve, limit: int = MAX_POINTS) -> dict[str, Any]:
    """Return a line with at most `limit` points.

    With more, each point is the mean of some steps, and the smallest and the largest value of them
    are kept too, so that no spike vanishes.
    """
    parts = _intervals(len(curve.steps), limit)
    is_thinned = len(parts) < len(curve.steps)
    data: dict[str, Any] = {
        "line": curve.line,
        "run": curve.line if curve.run is None else curve.run,
        "name": curve.label,
        "x": [_rounded(curve.steps[place]) for place in _middles(parts)],
        "y": _merged(curve.values, parts, _mean),
    }
    if curve.ghost:
        data["faint"] = _merged(curve.ghost, parts, max)
    if curve.bands:
        data["bands"] = [
            [_merged(low, parts, min), _merged(high, parts, max)]
            for low, high in map(_both_known, curve.bands)
        ]
    elif is_thinned:
        data["spread"] = [_merged(curve.values, parts, min), _merged(curve.values, parts, max)]
    return data


def clock_data(steps: Values, tokens: Values, seconds: Values) -> dict[str, list[float]]:
    """Return tokens and hours at some of the steps, from those that each step took."""
    places = [start for start, _ in _intervals(len(steps), MAX_CLOCK_POINTS - 1)]
    places += [len(steps) - 1] if steps and places[-1] != len(steps) - 1 else []
    clock = {"step": [_rounded(steps[place]) for place in places]}
    for unit, each, scale in (("tokens", tokens, 1.0), ("hours", seconds, 3600.0)):
        known = _totals(each)
        if known and known[-1] > 0:
            clock[unit] = [_rounded(known[place] / scale) for place in places]
    return {key: value for key, value in clock.items() if value}


def embedded_json(value: object, kind: str = "", name: str = "") -> str:
    """Return an element with a value that a script of the page reads.

    Everything beyond ASCII is escaped, a lone surrogate included, and so is what could end the
    element or begin another.
    """
    written = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        written = written.replace(character, f"\\u{ord(character):04x}")
    marks = "".join(
        f' {mark}="{escape(value)}"' for mark, value in (("class", kind), ("id", name)) if value
    )
    return f'<script type="application/json"{marks}>{written}</script>'


def style_classes(line: int) -> str:
    """Return the color and dash classes of a line; they distinguish 24 lines."""
    return f"c{line % COLORS} d{line // COLORS % DASHES}"


def swatch(line: int) -> str:
    """Return a short piece of a line, for a legend."""
    return (
        f'<svg class="swatch {style_classes(line)}" viewBox="0 0 26 8" aria-hidden="true">'
        '<line class="line" x1="2" x2="24" y1="4" y2="4"/></svg>'
    )


def _intervals(length: int, parts: int) -> list[tuple[int, int]]:
    """Divide the places of a line into at most `parts` parts of nearly equal size."""
    parts = min(parts, length)
    edges = [length * part // parts for part in range(parts + 1)] if parts else []
    return list(pairwise(edges))


def _middles(parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return a place in each part; those at the ends show how far the line goes."""
    middles = [(start + end - 1) // 2 for start, end in parts]
    if len(middles) > 1:
        middles[0], middles[-1] = parts[0][0], parts[-1][1] - 1
    return middles


def _merged(values: Values, parts: Sequence[tuple[int, int]], merge: Any) -> list[float | None]:
    merged: list[float | None] = []
    for start, end in parts:
        finite = [value for value in values[start:end] if math.isfinite(value)]
        merged.append(_rounded(merge(finite)) if finite else None)
    return merged


def _mean(values: Values) -> float:
    return sum(values) / len(values)


def _both_known(band: tuple[Values, Values]) -> tuple[Values, Values]:
    """Leave gaps where either end is not known: an area needs both."""
    gaps = [math.isnan(low + high) for low, high in zip(*band, strict=True)]
    low, high = (
        [math.nan if gap else value for gap, value in zip(gaps, values, strict=True)]
        for values in band
    )
    return low, high


def _totals(values: Iterable[float]) -> list[float]:
    totals: list[float] = []
    for value in values:
        totals.append((totals[-1] if totals else 0.0) + (value if value > 0 else 0.0))
    return totals


def _rounded(value: float) -> float:
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) else short
