"""An inspection as tables for a terminal."""

import math

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trustbatch.inspection.gradients import Estimate
from trustbatch.inspection.result import Inspection, ObjectiveRow
from trustbatch.inspection.token_summary import QUADRANTS
from trustbatch.observe.page_parts import DASH
from trustbatch.utils.terminal import plain_line


def show(console: Console, inspection: Inspection) -> None:
    """Print what was found: a line on the batch, two tables, findings and notes."""
    console.print(Text(headline(inspection)))
    console.print(_token_table(inspection))
    if inspection.own.gradient is not None:
        console.print(_gradient_table(inspection))
    for sentence in (*inspection.findings, *inspection.notes):
        console.print(Text(plain_line(sentence)))


def headline(inspection: Inspection) -> str:
    """Say which batch it is."""
    source = "from the log" if inspection.is_logged else "computed again"
    line = (
        f"{plain_line(inspection.run)}, step {inspection.step} ({source}): "
        f"{inspection.num_completions} completions, {inspection.num_tokens:,} tokens, of which "
        f"{inspection.num_with_advantage:,} have an advantage; 1-ESS {inspection.one_minus_ess:.2g}"
    )
    if inspection.rollout_temperature != inspection.policy_temperature:
        line += (
            f"; sampled at T = {inspection.rollout_temperature:g}, trained at "
            f"{inspection.policy_temperature:g}"
        )
    if inspection.fresh is not None:
        fresh = inspection.fresh
        line += (
            f". Fresh: {fresh.num_completions} completions in {fresh.num_parts} parts, reward "
            f"{fresh.mean_reward:.3f}, entropy {fresh.entropy:.3f}, gradient "
            f"{estimate(fresh.norm)}"
        )
    return f"{line}."


def estimate(value: Estimate | None, digits: int = 3) -> str:
    """Return a number with its standard error."""
    if value is None or not math.isfinite(value.value):
        return DASH
    return f"{value.value:.{digits}f} ± {value.standard_error:.{digits}f}"


def signed(value: Estimate | None) -> str:
    """Return a change with its standard error."""
    if value is None or not math.isfinite(value.value):
        return DASH
    return f"{value.value:+.3f} ± {value.standard_error:.3f}"


def number(value: float, digits: int = 3) -> str:
    """Return a number, or a dash for what can't be measured."""
    return f"{value:.{digits}f}" if math.isfinite(value) else DASH


def _token_table(inspection: Inspection) -> Table:
    short = [name.replace(",", "") for name in QUADRANTS]
    table = _table("Tokens with an advantage, in %", ["silenced", *short, "capped", "raised"])
    for row in inspection.rows:
        tokens = row.tokens
        shares = [tokens.silenced, *(tokens.silenced_in[name] for name in QUADRANTS)]
        shares += [tokens.capped, tokens.raised]
        table.add_row(_label(row), *(_percent(share) for share in shares))
    return table


def _gradient_table(inspection: Inspection) -> Table:
    own = inspection.own.label
    has_fresh = inspection.fresh is not None
    headings = ["norm", "cos own"]
    if has_fresh:
        headings += ["cos fresh", "drift of H", "beyond r A"]
    table = _table("Gradient", headings)
    for row in inspection.rows:
        gradient = row.gradient
        assert gradient is not None, "all rows have one, or none has"
        cells = [f"{gradient.norm:.3g}", number(gradient.cosines[own])]
        if has_fresh:
            cells.append(estimate(gradient.fresh_cosine))
            cells += [signed(gradient.entropy_drift), signed(gradient.drift_beyond_unclipped)]
        table.add_row(_label(row), *cells)
    return table


def _table(title: str, headings: list[str]) -> Table:
    # 80 columns hold either table where labels are short
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("objective", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _label(row: ObjectiveRow) -> Text:
    return Text(plain_line(row.label), style="bold" if row.is_own else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share else "0"
