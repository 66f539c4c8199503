"""The verdict as a table for people and as JSON for programs."""

from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trustbatch.doctor.distributions import SamplingDistribution
from trustbatch.doctor.examine import Examination
from trustbatch.doctor.verdict import Status, Verdict

STYLES = {Status.GOOD: "green", Status.CONFIGURED: "yellow", Status.FAULT: "bold red"}


def show(console: Console, examination: Examination, verdict: Verdict) -> None:
    """Print what was measured, one row for each check, and the verdict in words."""
    engine, total = examination.engine, examination.sampling.total
    console.print(
        f"{examination.policy}: engine {engine.engine} ({engine.precision}), trainer "
        f"{examination.trainer_precision}, {examination.num_sequences} completions, "
        f"{examination.num_tokens} tokens at {examination.sampling.configured}",
        markup=False,
        highlight=False,
    )
    console.print(
        f"E[r] = {total.mean_ratio:.6f} +- {total.mean_ratio_error:.1g}   1-ESS = "
        f"{total.one_minus_ess:.3g}   mean |l| = {total.mean_abs:.3g}   max |l| = "
        f"{total.max_abs:.3g}   without a ratio: {examination.sampling.num_nonfinite}",
        markup=False,
        highlight=False,
    )
    table = Table()
    for heading in ("check", "measured", "1-ESS of it alone", "finding"):
        table.add_column(heading)
    for finding in verdict.findings:
        table.add_row(
            finding.check,
            Text(finding.measured),  # brackets in it are no markup
            f"{finding.part.one_minus_ess:.2g}" if finding.part else "",
            Text(finding.status, style=STYLES.get(finding.status, "")),
        )
    console.print(table)
    for sentences in verdict.sentences:
        console.print(sentences, markup=False, highlight=False)


def to_record(examination: Examination, verdict: Verdict) -> dict[str, Any]:
    """Return everything as plain values."""
    return {
        "on_policy": verdict.is_on_policy,
        "faults": verdict.causes(Status.FAULT),
        "by_configuration": verdict.causes(Status.CONFIGURED),
        "verdict": verdict.sentences,
        "findings": _plain(verdict.findings),
        "examination": _plain(examination),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, SamplingDistribution):
        return str(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
