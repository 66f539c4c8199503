"""Line and band charts as inline SVG, without any dependency.

Colors and dashes are classes (`c0`..`c7`, `d0`..`d2`) that the page's stylesheet resolves, so that
one drawing works in the light and the dark theme.  A curve is one `<path>`: a gap in the data is a
new sub-path, never an interpolated line.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

COLORS = 8
DASHES = 3
MAX_POINTS = 400
MAX_GHOST_POINTS = 300
MAX_SMOOTH_POINTS = 160
MAX_BAND_POINTS = 160
LOG_FLOOR = 1e-16
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LABEL_WIDTH = 6.4  # pixels of one digit at the stylesheet's 11 px


@dataclass(frozen=True)
class Tick:
    """A position on an axis and the text written beside it."""

    value: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A range of values, linear or logarithmic, with its ticks."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    log: bool = False
    clamped: bool = False
    name: str = "step"
    """label of a horizontal axis"""

    def fraction(self, value: float) -> float:
        """Return where `value` lies between low (0) and high (1), held inside the axis."""
        if self.log:
            bounded = min(max(value, self.low), self.high)
            return math.log(bounded / self.low) / math.log(self.high / self.low)
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


@dataclass(frozen=True)
class Curve:
    """One run's line; NaN leaves a gap, and `ghost` is drawn faintly behind it.

    `low` and `high`, each as long as `steps`, are the ends of an interval around it.
    """

    run: int
    label: str
    steps: Sequence[float]
    values: Sequence[float]
    ghost_steps: Sequence[float] = ()
    ghost: Sequence[float] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marked: bool = False
    """draws a dot on every point"""


@dataclass(frozen=True)
class Band:
    """One run's quantiles p01, p10, p50, p90 and p99, each as long as `steps`."""

    run: int
    label: str
    steps: Sequence[float]
    quantiles: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Frame:
    """The size of a drawing in pixels and the margins its plot area leaves free."""

    width: int
    height: int
    left: float = 48
    right: float = 16
    top: float = 10
    bottom: float = 36

    def x(self, axis: Axis, value: float) -> float:
        """Return the horizontal pixel of a step."""
        return self.left + axis.fraction(value) * (self.width - self.left - self.right)

    def y(self, axis: Axis, value: float) -> float:
        """Return the vertical pixel of a value."""
        return self.height - self.bottom - axis.fraction(value) * self._plot_height()

    def _plot_height(self) -> float:
        return self.height - self.top - self.bottom


def nice_step(span: float, parts: int) -> float:
    """Return the 1, 2 or 5 times a power of ten that cuts `span` into about `parts` pieces."""
    rough = span / max(parts, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1.0, 2.0, 5.0):
        if rough <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power


def linear_axis(values: Iterable[float], *, zero: bool = False, parts: int = 5) -> Axis:
    """Return a linear axis whose ends are ticks; `zero` makes it start (or end) at zero."""
    low, high = _extent(values, (0.0, 1.0))
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # A constant curve needs some height, also if it differs by rounding only.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) / 2 or 1.0
        low, high = (low - pad if low else 0.0), high + pad
    step = nice_step(high - low, parts)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(
        Tick(index * step, number_label(index * step, step)) for index in range(first, last + 1)
    )
    return Axis(first * step, last * step, ticks)


def step_axis(steps: Iterable[float], parts: int = 6, name: str = "step") -> Axis:
    """Return the horizontal axis: it ends at the data, and its ticks are whole steps."""
    low, high = _extent(steps, (0.0, 1.0))
    if low == high:
        return Axis(low - 1, high + 1, (Tick(low, number_label(low, 1)),), name=name)
    step = max(nice_step(high - low, parts), 1.0)
    first, last = math.ceil(low / step), math.floor(high / step)
    ticks = tuple(
        Tick(index * step, number_label(index * step, step)) for index in range(first, last + 1)
    )
    return Axis(low, high, ticks, name=name)


def log_axis(
    values: Iterable[float], *, floor: float = LOG_FLOOR, ceiling: float = 1 / LOG_FLOOR
) -> Axis:
    """Return a logarithmic axis; values that are zero, negative or beyond the limits are clamped.

    The lower limit follows the data: if values are clamped, it is one decade below the smallest
    positive value, but never below `floor`.
    """
    data = [value for value in values if math.isfinite(value)]
    positive = [min(max(value, floor), ceiling) for value in data if value > 0]
    clamped = any(value < floor for value in data)
    low, high = _extent(positive, (floor, 1.0))
    bottom = math.floor(math.log10(low) + 1e-9)
    top = math.ceil(math.log10(high) - 1e-9)
    if clamped:
        bottom = max(bottom - 1, round(math.log10(floor)))
    if high < 30 * low and not clamped:
        return _narrow_log_axis(low, high)
    top = max(top, bottom + 1)
    stride = math.ceil((top - bottom) / 6)
    ticks = [Tick(10.0**power, power_label(power)) for power in range(bottom, top + 1, stride)]
    if clamped:
        ticks[0] = Tick(ticks[0].value, f"≤{ticks[0].label}")
    return Axis(10.0**bottom, 10.0**top, tuple(ticks), log=True, clamped=clamped)


def _narrow_log_axis(low: float, high: float) -> Axis:
    """Return a log axis of about one decade, where powers of ten alone are too few ticks."""
    start = math.floor(math.log10(low)) - 1
    marks = [factor * 10.0**power for power in range(start, start + 5) for factor in (1, 2, 5)]
    below = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    above = min(mark for mark in marks if mark >= high * (1 - 1e-9))
    if below == above:
        place = marks.index(below)
        below, above = marks[place - 1], marks[place + 1]
    ticks = tuple(Tick(mark, f"{mark:g}") for mark in marks if below <= mark <= above)
    return Axis(below, above, ticks, log=True)


def number_label(value: float, step: float) -> str:
    """Format a tick with as many decimals as the distance between ticks needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or step < 1e-4:
        digits = max(1, math.ceil(math.log10(abs(value) / step) + 1e-9) + 1)
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def power_label(power: int) -> str:
    """Format a power of ten with a superscript exponent."""
    return "10" + str(power).translate(_SUPERSCRIPT)


def thin(
    steps: Sequence[float], values: Sequence[float], limit: int = MAX_POINTS
) -> tuple[list[float], list[float]]:
    """Keep at most `limit` points: both ends, and the extremes of every interval between.

    Extremes instead of every n-th point, so that no spike vanishes.
    """
    count = len(steps)
    if count <= limit:
        return list(steps), list(values)
    kept = {0, count - 1}
    for start, end in _intervals(1, count - 1, (limit - 2) // 2):
        finite = [index for index in range(start, end) if math.isfinite(values[index])]
        kept.update(
            {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            if finite
            else {start}
        )
    order = sorted(kept)
    return [steps[index] for index in order], [values[index] for index in order]


def smooth(values: Sequence[float]) -> list[float]:
    """Return a centered moving average over about a twentieth of the curve; gaps stay gaps."""
    half = len(values) // 40 if len(values) >= 40 else int(len(values) >= 8)
    result: list[float] = []
    for index, value in enumerate(values):
        near = values[max(0, index - half) : index + half + 1]
        finite = [other for other in near if math.isfinite(other)]
        result.append(sum(finite) / len(finite) if math.isfinite(value) else math.nan)
    return result


def style_classes(run: int) -> str:
    """Return the color and dash classes of a run; they distinguish 24 runs."""
    return f"c{run % COLORS} d{run // COLORS % DASHES}"


def line_chart(curves: Sequence[Curve], x: Axis, y: Axis, frame: Frame, label: str) -> str:
    """Return an SVG with one line for every curve."""
    frame = _fit(frame, y)
    ghosts, lines = "", ""
    for curve in curves:
        if curve.ghost:
            points = thin(curve.ghost_steps, curve.ghost, MAX_GHOST_POINTS)
            ghosts += _series(curve.run, curve.label, _path("ghost", *points, x, y, frame))
        if curve.low:
            area = _area("outer", curve.steps, curve.low, curve.high, x, y, frame)
            ghosts += _series(curve.run, curve.label, area)
        limit = MAX_SMOOTH_POINTS if curve.ghost else MAX_POINTS
        points = thin(curve.steps, curve.values, limit)
        line = _path("line", *points, x, y, frame)
        if curve.marked:
            line += _path("dots", *_apart(*points), x, y, frame)
        lines += _series(curve.run, curve.label, line)
    # All ghosts are behind all lines, so that no run's noise covers another's curve.
    return _svg(frame, x, y, label, ghosts + lines)


def band_chart(band: Band, x: Axis, y: Axis, frame: Frame, label: str) -> str:
    """Return an SVG with the bands p01-p99 and p10-p90 of one run around its median."""
    frame = _fit(frame, y)
    steps, (p01, p10, p50, p90, p99) = _thin_band(band)
    drawn = _area("outer", steps, p01, p99, x, y, frame)
    drawn += _area("inner", steps, p10, p90, x, y, frame)
    drawn += _path("line", steps, p50, x, y, frame)
    level = frame.y(y, 1.0)
    one = (
        f'<line class="one" x1="{_px(frame.left)}" x2="{_px(frame.width - frame.right)}" '
        f'y1="{_px(level)}" y2="{_px(level)}"/>'
    )
    return _svg(frame, x, y, label, one + _series(band.run, "median", drawn))


def legend(entries: Sequence[tuple[int, str]], *, fold: bool = False) -> str:
    """Return the list of runs in a chart, each with a swatch of its line.

    `fold` hides a list of more runs than there are colors until the reader opens it.
    """
    items = "".join(
        f'<li data-run="{run}" title="{escape(label)}">{swatch(run)}'
        f"<span>{escape(label)}</span></li>"
        for run, label in entries
    )
    names = f'<ul class="legend">{items}</ul>'
    if not fold or len(entries) <= COLORS:
        return names
    return f'<details class="fold"><summary>{len(entries)} runs</summary>{names}</details>'


def swatch(run: int) -> str:
    """Return a short piece of a run's line, for a legend."""
    return (
        f'<svg class="swatch {style_classes(run)}" viewBox="0 0 26 8" aria-hidden="true">'
        '<line class="line" x1="2" x2="24" y1="4" y2="4"/></svg>'
    )


def _extent(values: Iterable[float], default: tuple[float, float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else default


def _intervals(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    edges = [start + (end - start) * part // parts for part in range(parts + 1)]
    return [(left, right) for left, right in pairwise(edges) if left < right]


def _thin_band(band: Band) -> tuple[list[float], list[list[float]]]:
    """Thin five curves at the same steps; bands are widened so that no spike is hidden."""
    gaps = [not all(map(math.isfinite, row)) for row in zip(*band.quantiles, strict=True)]
    cut = [
        [math.nan if gap else value for gap, value in zip(gaps, curve, strict=True)]
        for curve in band.quantiles
    ]
    if len(band.steps) <= MAX_BAND_POINTS:
        return list(band.steps), cut
    steps: list[float] = []
    result: list[list[float]] = [[] for _ in cut]
    for start, end in _intervals(0, len(band.steps), MAX_BAND_POINTS):
        steps.append(band.steps[(start + end - 1) // 2])
        for place, curve in enumerate(cut):
            finite = sorted(value for value in curve[start:end] if math.isfinite(value))
            pick = (0, 0, len(finite) // 2, -1, -1)[place]
            result[place].append(finite[pick] if finite else math.nan)
    return steps, result


def _fit(frame: Frame, y: Axis) -> Frame:
    """Make the left margin as wide as the longest label of the vertical axis."""
    longest = max((len(tick.label) for tick in y.ticks), default=1)
    left = 14 + _LABEL_WIDTH * max(longest, 3)
    return Frame(frame.width, frame.height, left, frame.right, frame.top, frame.bottom)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _runs_of_points(
    steps: Sequence[float], values: Sequence[float], x: Axis, y: Axis, frame: Frame
) -> list[list[str]]:
    """Return the pixels of a curve, split where the data has gaps."""
    parts: list[list[str]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            parts[-1].append(f"{_px(frame.x(x, step))},{_px(frame.y(y, value))}")
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _path(
    kind: str, steps: Sequence[float], values: Sequence[float], x: Axis, y: Axis, frame: Frame
) -> str:
    parts = _runs_of_points(steps, values, x, y, frame)
    # A single point is a very short stroke: its round caps make it a visible dot.
    drawn = "".join(
        f"M{part[0]}" + (f"L{' '.join(part[1:])}" if len(part) > 1 else "h.1") for part in parts
    )
    return f'<path class="{kind}" d="{drawn}"/>' if drawn else ""


def _apart(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Put a gap after every point, so that each is drawn separately."""
    spread_steps = [step for step in steps for _ in range(2)]
    return spread_steps, [each for value in values for each in (value, math.nan)]


def _area(
    kind: str,
    steps: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    x: Axis,
    y: Axis,
    frame: Frame,
) -> str:
    lower = _runs_of_points(steps, low, x, y, frame)
    upper = _runs_of_points(steps, high, x, y, frame)
    drawn = "".join(
        f"M{' '.join([*above, *reversed(below)])}Z"
        for above, below in zip(upper, lower, strict=True)
    )
    return f'<path class="{kind}" d="{drawn}"/>' if drawn else ""


def _series(run: int, label: str, drawn: str) -> str:
    return (
        f'<g class="series {style_classes(run)}" data-run="{run}" '
        f'data-label="{escape(label)}">{drawn}</g>'
    )


def _svg(frame: Frame, x: Axis, y: Axis, label: str, body: str) -> str:
    """Wrap a drawing with its axes; the data attributes let the page turn pixels into values."""
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    grid = "".join(
        f'<line class="grid" x1="{_px(frame.left)}" x2="{_px(right)}" y1="{_px(at)}" '
        f'y2="{_px(at)}"/><text class="tick y" x="{_px(frame.left - 7)}" y="{_px(at + 3.8)}">'
        f"{escape(tick.label)}</text>"
        for tick in y.ticks
        for at in (frame.y(y, tick.value),)
    )
    grid += "".join(
        f'<text class="tick x" x="{_px(frame.x(x, tick.value))}" y="{_px(bottom + 16)}">'
        f"{escape(tick.label)}</text>"
        for tick in x.ticks
    )
    grid += f'<text class="axis" x="{_px((frame.left + right) / 2)}" y="{frame.height - 5}">'
    scale = ' data-log="1"' if y.log else ""
    scale += ' data-x-log="1"' if x.log else ""
    scale += ' data-clamped="1"' if y.clamped else ""
    return (
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(label)}" data-x="{_px(frame.left)} {_px(right)} {x.low!r} {x.high!r}"'
        f' data-x-name="{escape(x.name)}"'
        f' data-y="{_px(bottom)} {_px(frame.top)} {y.low!r} {y.high!r}"{scale}>'
        f"{grid}{escape(x.name)}</text>{body}</svg>"
    )
