"""The verdict of an examination: in words, as a table for people, and as JSON for programs."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trustbatch.config import Config
from trustbatch.config.cautions import cautions
from trustbatch.doctor.distributions import SamplingDistribution
from trustbatch.doctor.examine import Examination, Measurements
from trustbatch.doctor.findings import (
    Finding,
    Status,
    check_anchor,
    check_logprob_mode,
    check_micro_batch,
    check_precision,
    check_support,
    check_temperature,
    check_weights,
    second_policies,
)

STYLES = {Status.GOOD: "green", Status.CONFIGURED: "yellow", Status.FAULT: "bold red"}


@dataclass(frozen=True)
class Verdict:
    """All findings, with a summary and notes."""

    findings: list[Finding]
    summary: str
    notes: list[str]

    @property
    def is_on_policy(self) -> bool:
        """Whether engine and trainer differ by rounding alone."""
        return not self.causes(Status.FAULT) and not self.causes(Status.CONFIGURED)

    def causes(self, status: Status) -> list[str]:
        """Return the causes of all findings with a status."""
        return [f.cause for f in self.findings if f.status is status and f.cause]

    @property
    def sentences(self) -> list[str]:
        """The verdict in words: the summary, then faults, then what is configured, then notes."""
        explained = [f for f in self.findings if f.sentences]
        explained.sort(key=lambda finding: finding.status is not Status.FAULT)
        return [self.summary, *(finding.sentences for finding in explained), *self.notes]


def judge(examination: Examination, config: Config) -> Verdict:
    """Turn an examination into a verdict."""
    checks = (
        check_weights,
        check_precision,
        check_temperature,
        check_support,
        check_logprob_mode,
        check_micro_batch,
    )
    findings = [check(examination) for check in checks]
    findings += check_anchor(examination) + second_policies(config)
    return conclude(
        findings,
        examination,
        _notes(config),
        fault="Off-policy, and not as configured",
        by_intention="Off-policy by configuration alone",
    )


def conclude(
    findings: list[Finding],
    examination: Measurements,
    notes: list[str],
    *,
    fault: str,
    by_intention: str,
) -> Verdict:
    """Return the verdict of findings; the two texts begin its summary where it is off-policy."""
    statuses = {finding.status for finding in findings}
    total = examination.sampling.total
    numbers = (
        f"mean |l| = {total.mean_abs:.2g}, E[r] = {total.mean_ratio:.4g}, "
        f"1-ESS = {total.one_minus_ess:.2g}"
    )
    if Status.FAULT in statuses:
        summary = f"{fault} ({numbers})."
    elif Status.CONFIGURED in statuses:
        summary = f"{by_intention} ({numbers})."
    else:
        precision = examination.trainer_precision
        summary = f"On-policy up to the rounding of {precision} ({numbers})."
    return Verdict(findings, summary, notes)


def _notes(config: Config) -> list[str]:
    """Return what can't be measured before training: cautions, lag and repeated updates."""
    notes = cautions(config)
    if config.rollout.lag:
        notes.append(
            f"rollout.lag = {config.rollout.lag}: batches will be up to that many versions old, "
            "which can't be measured before training; watch one_minus_ess in the run."
        )
    updates = config.training.passes * config.training.mini_batches
    if updates > 1:
        notes.append(
            f"training.passes and training.mini_batches make {updates} updates of each batch: all "
            "but the first are off-policy by as much as the policy has moved."
        )
    return notes


def show(console: Console, examination: Measurements, verdict: Verdict) -> None:
    """Print the measurements, a row per check, and the verdict in words."""
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
        f"{total.max_abs:.3g}   non-finite ratios: {examination.sampling.num_nonfinite}",
        markup=False,
        highlight=False,
    )
    table = Table()
    for heading in ("check", "measured", "1-ESS of this alone", "finding"):
        table.add_column(heading)
    for finding in verdict.findings:
        table.add_row(
            finding.check,
            Text(finding.measured),  # its brackets are not markup
            f"{finding.part.one_minus_ess:.2g}" if finding.part else "",
            Text(finding.status, style=STYLES.get(finding.status, "")),
        )
    console.print(table)
    for sentences in verdict.sentences:
        console.print(sentences, markup=False, highlight=False)


def to_record(examination: Measurements, verdict: Verdict) -> dict[str, Any]:
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
