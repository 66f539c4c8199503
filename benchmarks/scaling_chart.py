"""Line charts in SVG, written by hand: no plotting library is needed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#8a8a8a", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e")
WIDTH, HEIGHT, GAP, LEFT, TOP = 400, 240, 70, 60, 40
ROW = 20


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over the same marks on the axis below."""

    title: str
    lines: Sequence[Line]
    percent: bool = False


def draw_chart(panels: Sequence[Panel], marks: Sequence[str], axis: str, caption: str) -> str:
    """Return panels side by side, with one legend and a caption below; all begin at zero."""
    names = [line.name for line in panels[0].lines]
    width = LEFT + len(panels) * (WIDTH + GAP)
    legend = TOP + HEIGHT + 60
    height = legend + ROW * (len(names) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, marks, axis, left=LEFT + number * (WIDTH + GAP))
    for number, name in enumerate(names):
        y = legend + ROW * number
        parts.append(
            f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 30}" y2="{y}" stroke="{COLORS[number]}" '
            f'stroke-width="2"/><text x="{LEFT + 38}" y="{y + 4}">{escape(name)}</text>'
        )
    parts.append(
        f'<text x="{LEFT}" y="{legend + ROW * len(names) + 4}" fill="#555555">'
        f"{escape(caption)}</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, marks: Sequence[str], axis: str, *, left: int) -> list[str]:
    top = _round_up(max(max(line.values) for line in panel.lines))
    if panel.percent:
        top = 1.0
    across = WIDTH / max(len(marks) - 1, 1)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / top)

    parts = [f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{escape(panel.title)}</text>']
    for fifth in range(6):
        value = top * fifth / 5
        label = f"{value:.0%}" if panel.percent else f"{value:.3g}"
        parts.append(
            f'<line x1="{left}" y1="{y(value):.1f}" x2="{left + WIDTH}" y2="{y(value):.1f}" '
            f'stroke="#dddddd"/><text x="{left - 8}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{label}</text>'
        )
    for number, mark in enumerate(marks):
        parts.append(
            f'<text x="{left + across * number:.1f}" y="{TOP + HEIGHT + 18}" '
            f'text-anchor="middle">{escape(mark)}</text>'
        )
    parts.append(
        f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">'
        f"{escape(axis)}</text>"
    )
    for line, color in zip(panel.lines, COLORS, strict=False):
        points = [(left + across * at, y(value)) for at, value in enumerate(line.values)]
        path = " ".join(f"{x:.1f},{height:.1f}" for x, height in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{height:.1f}" r="3" fill="{color}"/>' for x, height in points
        ]
    return parts


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 2.5, 4, 5, 8 and 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 8, 10) if value <= step * power * 1.0001)
