"""The ledger of trust in the report: how much of 1-ESS comes from what, and at which tokens."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trustbatch.observe.charts import ChartSpec, Curve, Look, chart_data, embedded_json, swatch
from trustbatch.observe.page_parts import details, figure, text
from trustbatch.observe.report_data import Run, number
from trustbatch.training.ledger import CAUSES

_FIRST_LINE = 96
"""a number of lines above that of any run, with the first color and no dashes"""
_BINS = {"position": "Position", "probability": "Probability"}
_HINT = (
    "1-ESS taken apart by what made the ratios differ from 1, by the position of a token in its "
    "completion, and by its probability; measured on some steps. Shares add up to 1; E[r] is the "
    "mean ratio, 1 on-policy."
)


def ledger_section(runs: Sequence[Run]) -> str:
    """Return the section, or nothing where no run kept a ledger."""
    blocks = [
        details(index, run.name, _charts(index, run) + _tables(newest))
        for index, run in enumerate(runs)
        if (newest := newest_ledger(run)) is not None
    ]
    if not blocks:
        return ""
    opened = blocks[0].replace("<details>", "<details open>", 1)
    return (
        f'<section id="ledger"><h2>Ledger of 1-ESS</h2><p class="hint">{_HINT}</p>\n'
        + "\n".join([opened, *blocks[1:]])
        + "</section>"
    )


def newest_ledger(run: Run) -> Mapping[str, Any] | None:
    """Return the last row of the metrics that has a ledger."""
    return next(
        (row for row in reversed(run.rows) if any(key.startswith("ledger/") for key in row)), None
    )


def ledger_curves(index: int, run: Run) -> list[Curve]:
    """Return 1-ESS by cause."""
    curves = []
    for place, cause in enumerate(CAUSES):
        steps, values = run.series(f"ledger/{cause}/one_minus_ess")
        if any(map(math.isfinite, values)):
            curves.append(Curve(_FIRST_LINE + place, _words(cause), steps, values, run=index))
    return curves


def _charts(index: int, run: Run) -> str:
    spec = ChartSpec(
        "ledger", f"1-ESS by cause, {run.name}", "", scale="log", smoothed=False, optional=True
    )
    curves = ledger_curves(index, run)
    if not curves:
        return ""
    # the search for runs must not hide causes
    look = Look(marked=len(curves[0].steps) < 30, unfiltered=True)
    data = embedded_json(chart_data(spec, curves, look), "chart-data")
    return f'<div class="ledger-chart" data-metric="ledger">{data}</div>'


def _tables(row: Mapping[str, Any]) -> str:
    tables = [_causes(row), *(_bins(row, kind) for kind in _BINS)]
    return (
        f"<h4>Step {text(row['step'])} <small>the newest ledger</small></h4>"
        f'<div class="ledger">{"".join(tables)}</div>'
    )


def _causes(row: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{swatch(_FIRST_LINE + place)}<span>{text(_words(cause))}</span>",
            row.get(f"ledger/{cause}/one_minus_ess"),
            row.get(f"ledger/{cause}/ratio_mean"),
            row.get(f"ledger/{cause}/share"),
        )
        for place, cause in enumerate(CAUSES)
        if any(key.startswith(f"ledger/{cause}/") for key in row)
    ]
    return _bar_table(("Cause", "1-ESS", "E[r]", "Share"), rows, whole=1.0)


def _bins(row: Mapping[str, Any], kind: str) -> str:
    pattern = re.compile(rf"ledger/{kind}/([^/]+)/one_minus_ess")
    names = [found[1] for key in row if (found := pattern.fullmatch(key))]
    rows = []
    for name in names:
        value = row[f"ledger/{kind}/{name}/one_minus_ess"]
        ratio = row.get(f"ledger/{kind}/{name}/ratio_mean")
        rows.append((text(_range(name)), value, ratio, value))
    largest = max((number(row[3]) for row in rows), default=math.nan)
    return _bar_table((_BINS[kind], "1-ESS", "E[r]", ""), rows, whole=largest)


def _words(cause: str) -> str:
    return cause.replace("_", " ")


def _range(name: str) -> str:
    """Return a bin such as "16-63" in words; the last one of positions has no end."""
    low, _, high = name.partition("-")
    return f"{low} to {high}" if high else f"{low} and more"


def _bar_table(
    headings: tuple[str, str, str, str],
    rows: Sequence[tuple[str, object, object, object]],
    *,
    whole: float,
) -> str:
    """Return a table of a name (HTML), two numbers and a bar that is full at `whole`."""
    if not rows:
        return ""
    body = "".join(
        f'<tr><th scope="row">{name}</th><td class="number">{figure(value)}</td>'
        f'<td class="number">{figure(ratio)}</td><td class="bar">{_bar(size, whole)}</td></tr>'
        for name, value, ratio, size in rows
    )
    heads = "".join(
        f'<th scope="col"{" class=number" if place in (1, 2) else ""}>{text(heading)}</th>'
        for place, heading in enumerate(headings)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _bar(size: object, whole: float) -> str:
    share = number(size) / whole if whole > 0 else math.nan
    if not math.isfinite(share):
        return ""
    # + 0.0: a share of -0.001 is 0%, not -0%
    percent = f"{round(share, 2) + 0.0:.0%}" if whole == 1.0 else ""
    return f'<i style="width: {min(max(share, 0.0), 1.0) * 55:.1f}%"></i>{percent}'
