"""The campaign as a picture: objectives x regimes, colored by held-out reward, dead runs marked.

An SVG written by hand, with a background of its own, so that it reads on light and dark pages.
Rows are sorted by the number of regimes with runs, then by the mean over them; columns are in the
order of REGIMES, those of the campaign without any run named below instead of shown empty.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from evidence_runs import (
    CAMPAIGN,
    LABELS,
    REGIMES,
    Row,
    mean_over_regimes,
    means_over_seeds,
    shown_regimes,
)

WIDTH, MARGIN, LABEL, MEAN, DEATHS = 880, 20, 150, 58, 72
CELL_HEIGHT, GAP, HEAD_TOP, LINE = 50, 3, 66, 15
MAX_CELL = 100
LEGEND_WIDTH, LEGEND_HEIGHT = 340, 14
CHARACTER = 6.6
"""width of one of the legend's characters"""
# of the color map viridis, at equal distances: its lightness rises steadily, so that it reads
# without color vision and in print
SHADES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
TITLE = "Held-out reward after RL, by objective and kind of rollouts"
NOTE = "T is the temperature of rollouts (1 for held-out), lag how many versions they are behind."
INK, QUIET, LIGHT, NO_RUN = "#1f2328", "#59636e", "#ffffff", "#eff1f3"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What the picture shows."""

    rows: Mapping[str, Row]
    dead: float
    untrained: float
    setting: str

    @property
    def values(self) -> list[float]:
        """The held-out reward of every run."""
        return [
            value
            for row in self.rows.values()
            for seeds in row.values()
            for value in seeds.values()
        ]

    @property
    def top(self) -> float:
        """The end of the color scale, on which every cell's mean lies."""
        means = [each for row in self.rows.values() for each in means_over_seeds(row)]
        return math.ceil(max([*means, self.untrained]) * 50) / 50

    @property
    def arms(self) -> list[str]:
        """The arms from the top row to the last."""
        return sorted(
            self.rows,
            key=lambda arm: (-len(self.rows[arm]), -mean_over_regimes(self.rows[arm])),
        )


def draw_matrix(matrix: Matrix) -> str:
    """Return the picture."""
    regimes = shown_regimes(matrix.rows)
    room = WIDTH - 2 * MARGIN - LABEL - MEAN - DEATHS
    across = min(room / len(regimes), MAX_CELL)
    heads = [_wrapped(REGIMES[each], int(across / 7)) for each in regimes]
    top = HEAD_TOP + LINE * max(map(len, heads)) + 8
    parts = [_text(MARGIN, 30, TITLE, 17, bold=True)]
    parts.append(
        _text(MARGIN, 50, f"{matrix.setting}. A number is the mean over seeds.", 13, QUIET)
    )
    for place, lines in enumerate(heads):
        parts += _column_head(_left(place, across) + across / 2, top, lines)
    after = _left(len(regimes), across)
    parts += _column_head(after + MEAN / 2, top, ["mean"])
    parts += _column_head(after + MEAN + DEATHS / 2, top, ["dead", "runs"])
    for number, arm in enumerate(matrix.arms):
        parts += _row(matrix, arm, regimes, top + number * CELL_HEIGHT, across)
    below = top + len(matrix.rows) * CELL_HEIGHT + 26
    parts += _scale(matrix, below)
    parts += _marks(matrix, below)
    notes = [NOTE]
    missing = [REGIMES[each] for each in CAMPAIGN if each not in regimes]
    if missing:
        notes.append(f"Planned, and not run yet: {'; '.join(missing)}.")
    first = below + 62
    parts += [
        _text(MARGIN, first + 18 * place, note, 12, QUIET) for place, note in enumerate(notes)
    ]
    height = first + 18 * len(notes)
    return "\n".join([*_frame(matrix, height), *parts, "</svg>"]) + "\n"


def _left(place: int, across: float) -> float:
    return MARGIN + LABEL + place * across


def _frame(matrix: Matrix, height: float) -> list[str]:
    """Return the beginning of the file: background, name and description, hatching."""
    values, arms = matrix.values, len(matrix.rows)
    num_dead = sum(value < matrix.dead for value in values)
    story = (
        f"A matrix of {arms} objectives and {len(shown_regimes(matrix.rows))} kinds of rollouts, "
        f"{len(values)} runs, of which {num_dead} are dead: below {matrix.dead:g}, where the "
        f"untrained model has {matrix.untrained:.3f}. The numbers are in docs/results.md."
    )
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img" aria-labelledby="name story" '
        "font-family=\"-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        f'<title id="name">{escape(TITLE)}</title>',
        f'<desc id="story">{escape(story)}</desc>',
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="7" '
        f'stroke="{LIGHT}" stroke-opacity="0.4" stroke-width="2"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="{LIGHT}"/>',
    ]


def _column_head(center: float, bottom: float, lines: Sequence[str]) -> list[str]:
    """Return the lines of a head, of which the last stands just above the cells."""
    first = bottom - 8 - LINE * (len(lines) - 1)
    return [
        _text(center, first + LINE * place, line, 12, QUIET, anchor="middle")
        for place, line in enumerate(lines)
    ]


def _row(matrix: Matrix, arm: str, regimes: Sequence[str], top: float, across: float) -> list[str]:
    """Return an objective's label, its cells, and its mean and dead runs."""
    row = matrix.rows[arm]
    middle = top + CELL_HEIGHT / 2 + 4
    lines = _wrapped(LABELS[arm], LABEL // 7)
    first = middle - LINE * (len(lines) - 1) / 2
    parts = [_text(MARGIN, first, lines[0].rstrip(","), 14, bold=True)]
    parts += [
        _text(MARGIN, first + LINE * place, line, 12, QUIET)
        for place, line in enumerate(lines[1:], 1)
    ]
    for place, regime in enumerate(regimes):
        parts += _cell(matrix, row.get(regime, {}), _left(place, across), top, across)
    after = _left(len(regimes), across)
    if len(row) == len(regimes):
        shown = f"{mean_over_regimes(row):.3f}"
        parts.append(_text(after + MEAN / 2, middle, shown, 14, anchor="middle"))
    values = [value for seeds in row.values() for value in seeds.values()]
    num_dead = sum(value < matrix.dead for value in values)
    shown = f"{num_dead} of {len(values)}"
    parts.append(
        _text(after + MEAN + DEATHS / 2, middle, shown, 14, bold=num_dead > 0, anchor="middle")
    )
    return parts


def _cell(
    matrix: Matrix, seeds: Mapping[int, float], left: float, top: float, across: float
) -> list[str]:
    """Return a cell: the mean over its color, and a mark per seed; hatched if all are dead."""
    size = across - GAP, CELL_HEIGHT - GAP
    if not seeds:
        return [_box(left, top, *size, NO_RUN)]
    values = list(seeds.values())
    color = shade(fmean(values) / matrix.top)
    ink = ink_on(color)
    parts = [_box(left, top, *size, f"rgb({color[0]},{color[1]},{color[2]})")]
    if max(values) < matrix.dead:
        parts.append(_box(left, top, *size, "url(#hatch)"))
    center = left + size[0] / 2
    font = 15 if across > 70 else 13
    shown = f"{fmean(values):.3f}"
    parts.append(_text(center, top + 22, shown, font, ink, bold=True, anchor="middle"))
    pitch = min(13.0, (size[0] - 8) / len(values))
    first = center - pitch * (len(values) - 1) / 2
    return parts + [
        _mark(first + pitch * place, top + size[1] - 13, value < matrix.dead, ink)
        for place, value in enumerate(values)
    ]


def _scale(matrix: Matrix, top: float) -> list[str]:
    """Return the color scale with the dead line and the untrained model."""
    bands, left = 66, MARGIN + 14
    parts = []
    for band in range(bands):
        color = shade((band + 0.5) / bands)
        # a little wider than its band, so that no seam shows
        parts.append(
            f'<rect x="{left + LEGEND_WIDTH * band / bands:.1f}" y="{top:g}" '
            f'width="{LEGEND_WIDTH / bands + 0.6:.1f}" '
            f'height="{LEGEND_HEIGHT}" fill="rgb({color[0]},{color[1]},{color[2]})"/>'
        )
    bottom = top + LEGEND_HEIGHT
    parts.append(_text(left - 6, bottom - 3, "0", 12, QUIET, anchor="end"))
    parts.append(_text(left + LEGEND_WIDTH + 6, bottom - 3, f"{matrix.top:.2f}", 12, QUIET))
    for value, label, anchor in (
        (matrix.dead, f"dead below {matrix.dead:g}", "end"),
        (matrix.untrained, f"untrained {matrix.untrained:.3f}", "start"),
    ):
        x = left + LEGEND_WIDTH * value / matrix.top
        parts.append(
            f'<line x1="{x:.1f}" y1="{top - 4:g}" x2="{x:.1f}" y2="{bottom + 5:g}" '
            f'stroke="{INK}" stroke-width="1.5"/>'
        )
        # a label that ends at its line must still begin inside the picture
        beside = max(x + 8, MARGIN + CHARACTER * len(label)) if anchor == "end" else x - 8
        parts.append(_text(beside, bottom + 19, label, 12, QUIET, anchor=anchor))
    return parts


def _marks(matrix: Matrix, top: float) -> list[str]:
    """Return the legend of marks."""
    left, other, row = MARGIN + LEGEND_WIDTH + 110, MARGIN + LEGEND_WIDTH + 290, top + 11
    darkest = shade(0.0)
    return [
        _mark(left, row - 4, False, INK),
        _text(left + 15, row, "a seed that lives", 12, QUIET),
        _mark(left, row + 20, True, INK),
        _text(left + 15, row + 24, "a dead seed", 12, QUIET),
        _box(other - 9, row - 11, 18, 14, f"rgb({darkest[0]},{darkest[1]},{darkest[2]})"),
        _box(other - 9, row - 11, 18, 14, "url(#hatch)"),
        _text(other + 18, row, "all seeds are dead", 12, QUIET),
        _box(other - 9, row + 13, 18, 14, NO_RUN),
        _text(other + 18, row + 24, "not run", 12, QUIET),
    ]


def shade(part: float) -> tuple[int, int, int]:
    """Return the color at a place of the scale, from 0 to 1."""
    place = min(max(part, 0.0), 1.0) * (len(SHADES) - 1)
    index = min(int(place), len(SHADES) - 2)
    red, green, blue = (
        round(start + (end - start) * (place - index))
        for start, end in zip(SHADES[index], SHADES[index + 1], strict=True)
    )
    return red, green, blue


def ink_on(color: tuple[int, int, int]) -> str:
    """Return the ink that has more contrast with a color, by the luminance of WCAG 2."""
    linear = [
        part / 12.92 if (part := value / 255) <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for value in color
    ]
    luminance = sum(w * each for w, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if (luminance + 0.05) ** 2 > 1.05 * 0.065 else LIGHT


def _wrapped(text: str, width: int) -> list[str]:
    """Return a label in lines of about this many characters."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= width and not lines[-1].endswith(","):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _mark(x: float, y: float, is_dead: bool, ink: str) -> str:
    if not is_dead:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{ink}"/>'
    return (
        f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{ink}" '
        'stroke-width="2.6" fill="none"/>'
    )


def _box(left: float, top: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="4" fill="{fill}"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    color: str = INK,
    *,
    bold: bool = False,
    anchor: str = "start",
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
        f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
    )
