"""The run report: one self-contained HTML file.

Text from a run (names, prompts, completions, configuration) must pass through `text` before it
reaches the page.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from trustbatch.errors import ConfigError
from trustbatch.observe.charts import swatch
from trustbatch.observe.page_parts import (
    DASH,
    as_bytes,
    asset,
    details,
    figure,
    flatten,
    html_page,
    numeric,
    settings_block,
    text,
)
from trustbatch.observe.report_charts import charts_section
from trustbatch.observe.report_data import Run, distinct_names, read_runs
from trustbatch.observe.report_ledger import ledger_section
from trustbatch.observe.status import ENGINE_METRICS
from trustbatch.observe.viewer import viewer
from trustbatch.utils.files import write_atomically

LONGEST_NAME = 80
"""of the runs in the name of a report's file"""
_WARNING_COUNTS = {
    "tokens/nonfinite": "non-finite tokens",
    "steps/skipped": "skipped steps",
    "dynamic/groups_missing": "batch slots filled with groups of equal rewards",
    "reward/failed": "completions whose grader failed",
    "reward/timed_out": "completions whose grader timed out",
    "reward/out_of_memory": "completions whose grader ran out of memory",
    "cluster/engine_restarts": "restarted engines",
    "cluster/reward_restarts": "restarted reward workers",
}
_SUMMARY_HEADINGS = (
    "Run",
    "Objective",
    "Temperature",
    "Lag",
    "Steps",
    "First reward",
    "Final reward",
    "Final 1\N{NON-BREAKING HYPHEN}ESS",
    "Tokens/s",
    "Notes",
)
_POLICY_HEADINGS = {
    "Share": "share",
    "Tokens": "tokens",
    "Reward": "reward",
    "1\N{NON-BREAKING HYPHEN}ESS": "one_minus_ess",
    "Mean ratio": "ratio_mean",
}
"""heading and the last part of the metric"""
_ENGINE_HEADINGS = {"Tokens/s": "tokens_per_second", "Busy share": "busy_share"}


def write_report(run_folders: Sequence[Path], output: Path, opening: str = "") -> Path:
    """Read the run folders, write one self-contained HTML page to `output` and return its path.

    `opening` is HTML of a section that comes first.
    """
    page = render_report(read_runs(run_folders), opening)
    output = Path(output)
    if output.is_dir():
        raise ConfigError(
            f"The report cannot be written to {output}, which is a folder: give a file name in it."
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, as_bytes(page))
    return output


def default_output(run_folders: Sequence[Path]) -> Path:
    """Return where a report goes: into the folder of its run, or beside the first of several."""
    resolved = list(dict.fromkeys(Path(folder).resolve() for folder in run_folders))
    if len(resolved) < 2:
        return Path(run_folders[0]) / "report.html"
    names = [name.replace("/", "-") for name in distinct_names(resolved)]
    stem = "-".join(names)
    if len(stem) > LONGEST_NAME:
        stem = f"{names[0][:LONGEST_NAME]}-and-{len(names) - 1}-more"
    first = Path(run_folders[0])
    parent = first.parent if first.name not in ("", "..") else resolved[0].parent
    return parent / f"report-{stem}.html"


def render_report(runs: Sequence[Run], opening: str = "") -> str:
    """Return the page of runs; `opening` is HTML of a section that comes first."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sections = {
        ("results", "Results"): opening,
        ("summary", "Summary"): _summary_section(runs),
        ("charts", "Charts"): charts_section(runs),
        ("ledger", "Ledger"): ledger_section(runs),
        ("engines", "Engines"): _engines_section(runs),
        ("completions", "Completions"): _completions_section(runs),
        ("settings", "Settings"): _settings_section(runs),
    }
    filled = {key: section for key, section in sections.items() if section}
    links = "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name in filled)
    return html_page(
        title=f"{title} · trustbatch report",
        header=f"<h1>{text(title)}</h1><p>trustbatch run report</p><nav>{links}</nav>",
        sections=list(filled.values()),
        style=asset("viewer.css"),
        script=asset("viewer_tokens.js") + asset("viewer.js"),
    )


def final_mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values in the last tenth of a metric, at least one step."""
    tail = values[-max(1, len(values) // 10) :]
    return _mean(tail)


def notes(run: Run) -> list[str]:
    """Return warnings about the run: missing steps, failures and unreadable files."""
    found: list[str] = []
    planned = run.steps_planned
    if not run.rows:
        found.append("no steps recorded")
    elif planned is not None and run.steps_done < planned:
        found.append(f"unfinished: {run.steps_done} of {planned} steps")
    for key, what in _WARNING_COUNTS.items():
        steps, values = run.series(key)
        bad = [index for index, value in enumerate(values) if value != 0]
        if bad:
            peak = max((v for v in values if math.isfinite(v)), default=math.nan)
            found.append(f"{what}: first at step {steps[bad[0]]:g}, up to {figure(peak)}")
    return found + run.problems


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _summary_section(runs: Sequence[Run]) -> str:
    heads = "".join(
        f'<th scope="col"{numeric(place in range(2, 9))}>{heading}</th>'
        for place, heading in enumerate(_SUMMARY_HEADINGS)
    )
    rows = "\n".join(_summary_row(index, run) for index, run in enumerate(runs))
    return (
        '<section id="summary"><h2>Summary</h2><div class="scroll"><table class="summary">'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        '<p class="hint">Final values are means over the last tenth of the steps; tokens per '
        "second are the mean over all steps.</p></section>"
    )


def _summary_row(index: int, run: Run) -> str:
    planned = run.steps_planned
    rewards = run.series("reward/mean")[1]
    numbers = (
        figure(run.option("rollout", "temperature")),
        figure(run.option("cluster", "max_lag") or run.option("rollout", "lag")),
        f"{run.steps_done:,} / {DASH if planned is None else f'{planned:,}'}",
        figure(rewards[0] if rewards else None),
        figure(final_mean(rewards)),
        figure(final_mean(run.series("one_minus_ess")[1])),
        figure(_mean(run.series("time/tokens_per_second")[1])),
    )
    cells = "".join(f'<td class="number">{cell}</td>' for cell in numbers)
    remarks = "".join(f'<span class="note">{text(note)}</span>' for note in notes(run))
    return (
        f'<tr><th scope="row">{swatch(index)}<span>{text(run.name)}</span></th>'
        f"<td>{_objective(run)}</td>{cells}<td>{remarks}</td></tr>"
    )


def _objective(run: Run) -> str:
    table = run.config.get("objective")
    options = dict(table) if isinstance(table, dict) else {}
    name = text(options.pop("name", DASH))
    rest = "".join(
        f"<code>{text(key)}={text(value)}</code> " for key, value in flatten(options)
    ).strip()
    return f"<strong>{name}</strong>" + (f'<div class="options">{rest}</div>' if rest else "")


def _engines_section(runs: Sequence[Run]) -> str:
    blocks = "\n".join(
        details(
            index,
            run.name,
            _means_table(run, "Engine", run.engines, ENGINE_METRICS, _ENGINE_HEADINGS),
        )
        for index, run in enumerate(runs)
        if run.engines
    )
    if not blocks:
        return ""
    return (
        '<section id="engines"><h2>Engines</h2><p class="hint">Means over the last tenth of the '
        f"steps, for engines in processes of their own.</p>\n{blocks}</section>"
    )


def _means_table(
    run: Run, heading: str, names: Sequence[str], prefix: str, columns: dict[str, str]
) -> str:
    """Return one row per name with the final means of the metrics PREFIX NAME/COLUMN."""
    heads = "".join(
        f'<th scope="col"{numeric(place > 0)}>{each}</th>'
        for place, each in enumerate((heading, *columns))
    )
    rows = "\n".join(
        f'<tr><th scope="row">{text(name)}</th>'
        + "".join(
            f'<td class="number">{figure(final_mean(run.series(f"{prefix}{name}/{key}")[1]))}</td>'
            for key in columns.values()
        )
        + "</tr>"
        for name in names
    )
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>\n"
    )


def _completions_section(runs: Sequence[Run]) -> str:
    policies = "\n".join(
        details(index, run.name, _policy_table(run))
        for index, run in enumerate(runs)
        if run.policies
    )
    return f'<section id="completions"><h2>Completions</h2>\n{policies}{viewer(runs)}</section>'


def _policy_table(run: Run) -> str:
    """Return what each policy contributed, where second policies sampled some completions."""
    return "<h4>Policies <small>means over the last tenth of the steps</small></h4>" + _means_table(
        run, "Policy", run.policies, "policy/", _POLICY_HEADINGS
    )


def _settings_section(runs: Sequence[Run]) -> str:
    blocks = "\n".join(
        details(index, run.name, settings_block(run.config_text, run.environment))
        for index, run in enumerate(runs)
    )
    return f'<section id="settings"><h2>Configuration and environment</h2>\n{blocks}</section>'
