"""The page of a study: one self-contained HTML file.

Text from a run or from a study's definition is escaped by `text` before it enters the page.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trustbatch.observe.charts import swatch
from trustbatch.observe.page_parts import (
    DASH,
    as_bytes,
    asset,
    details,
    html_page,
    numeric,
    settings_block,
    text,
)
from trustbatch.observe.report_data import read_rollouts
from trustbatch.studies.charts import (
    BAND_READING,
    Colors,
    pass_at_k_figures,
    reward_figures,
    trust_figures,
)
from trustbatch.studies.comparisons import Contender, contenders, table_rows
from trustbatch.studies.curves import write_curves
from trustbatch.studies.results import (
    BEST_REWARD,
    FINAL_REWARD,
    ArmResult,
    RunState,
    StudyResults,
    StudyRun,
    read_study,
)
from trustbatch.studies.samples import sample_table
from trustbatch.studies.tables import (
    SUMMARY_FILE,
    Column,
    arm_columns,
    difference_columns,
    hyper_parameters,
    study_summary,
)
from trustbatch.studies.verdict import StudyVerdict, judge, plain
from trustbatch.utils.files import write_atomically

PAGE_FILE = "index.html"
SAMPLES_SHOWN = 2
_HINT = (
    "Final reward is the mean over the last tenth of the steps (at least five), best reward the "
    "highest mean over as many; \N{PLUS-MINUS SIGN} is the standard deviation over seeds, or over "
    "arms for a mean of several arms. A reward has collapsed where that mean stays below half of "
    "its best until the end."
)


def write_study_page(folder: Path) -> Path:
    """Write the page and the summary of a study into its folder, and return the page's path."""
    results = read_study(Path(folder))
    verdict = judge(results)
    write_atomically(results.folder / SUMMARY_FILE, study_summary(results, verdict))
    page = results.folder / PAGE_FILE
    write_atomically(page, as_bytes(render_study(results, verdict)))
    return page


def write_csv(folder: Path) -> list[Path]:
    """Write the curves of a study into its folder as CSV, and return the files' paths."""
    return write_curves(read_study(Path(folder)))


def render_study(results: StudyResults, verdict: StudyVerdict) -> str:
    """Return the page of a study's results as HTML."""
    colors = Colors.of(results)
    kind = "charts" if len(results.regimes) > 4 else "charts wide"
    sections = {
        "verdict": ("Verdict", _verdict_section(results, verdict)),
        "reward": ("Reward", _charts(reward_figures(results, colors), BAND_READING, kind=kind)),
        "benchmarks": ("pass@k", _charts(pass_at_k_figures(results, colors))),
        "results": ("Results", _results_section(results, colors)),
        "trust": ("Trust", _charts(trust_figures(results, colors), kind="charts")),
        "runs": ("Runs", _runs_section(results, colors)),
        "completions": ("Completions", _completions_section(results, colors)),
        "settings": ("Where each curve comes from", _settings_section(results, colors)),
    }
    filled = {key: pair for key, pair in sections.items() if pair[1]}
    links = "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in filled.items())
    return html_page(
        title=f"{results.title} · trustbatch study",
        header=f"<h1>{text(results.title)}</h1>"
        f'<p class="question">{text(results.question)}</p>'
        f"<p>Study <b>{text(results.name)}</b> at scale <b>{text(results.scale)}</b>, "
        f"{_plural(len(results.arms), 'arm')}, {_plural(len(results.seeds), 'seed')}</p>"
        f"<nav>{links}</nav>",
        sections=[
            f'<section class="study" id="{key}"><h2>{title}</h2>\n{inner}</section>'
            for key, (title, inner) in filled.items()
        ],
        style=asset("study.css", "trustbatch.studies"),
    )


def _verdict_section(results: StudyResults, verdict: StudyVerdict) -> str:
    remarks = "".join(f"<li>{text(remark)}</li>" for remark in verdict.remarks)
    first, second = map(text, verdict.sentences)
    blocks = [
        f'<div class="card verdict"><p>{first}</p><p>{second}</p>'
        + (f"<ul>{remarks}</ul>" if remarks else "")
        + "</div>"
    ]
    inner = "".join(
        f"<h4>{text(results.regimes[regime])}</h4><p>{text(' '.join(each.sentences))}</p>"
        for regime, each in verdict.regimes.items()
    )
    if inner:
        blocks.append(_fold("Regime by regime", inner))
    if verdict.differences:
        table = _table(difference_columns(verdict.differences), words=("Regime", "Arm", "Compared"))
        title = f"Comparisons in {results.measure.name}, paired"
        blocks.append(_fold(title, table))
    return "\n".join(blocks)


def _charts(figures: str, hint: str = "", kind: str = "charts wide") -> str:
    if not figures:
        return ""
    written = f'<p class="hint">{text(hint)}</p>' if hint else ""
    return f'{written}<div class="{kind}">{figures}</div>'


def _results_section(results: StudyResults, colors: Colors) -> str:
    tables = []
    for regime, label in results.regimes.items():
        rows = table_rows(results.in_regime(regime))
        names = [f"{swatch(colors.number(row))}<span>{text(row.label)}</span>" for row in rows]
        heading = f"<h3>{text(label)}</h3>" if label else ""
        tables.append(heading + _table(arm_columns(rows), names=names, kind="arms"))
    if any(run.run for run in results.runs):
        tables.append(f'<p class="hint">{text(_HINT)}</p>')
    inner = "\n".join(tables)
    if len(results.regimes) < 2:
        return inner
    is_short = len(results.regimes) <= 2
    return _heat_map(results) + (inner if is_short else _fold("Every arm in every regime", inner))


def _heat_map(results: StudyResults) -> str:
    """Return a table of regimes by arms with the compared measure, colored from low to high."""
    by_regime = {regime: contenders(results.in_regime(regime)) for regime in results.regimes}
    names = dict.fromkeys(_column_name(each) for rivals in by_regime.values() for each in rivals)
    shown = {_column_name(each): each.label for rivals in by_regime.values() for each in rivals}
    means = [
        mean
        for rivals in by_regime.values()
        for each in rivals
        if (mean := each.mean(results.measure)) is not None
    ]
    low, high = min(means, default=0.0), max(means, default=1.0)
    heads = "".join(f'<th scope="col">{text(shown[name])}</th>' for name in names)
    rows = ""
    for regime, rivals in by_regime.items():
        found = {_column_name(each): each for each in rivals}
        cells = "".join(_heat_cell(results, found.get(name), low, high) for name in names)
        label = text(results.regimes[regime])
        rows += f'<tr><th scope="row">{label}</th>{cells}</tr>'
    anywhere = {_column_name(each): each for rivals in by_regime.values() for each in rivals}
    counts = "".join(
        f'<td class="plain">{_hyper_parameters(results, each)}</td>' for each in anywhere.values()
    )
    return (
        f"<h3>{text(results.measure.name.capitalize())} by regime</h3>"
        f'<div class="scroll"><table class="heat"><thead><tr><th></th>{heads}</tr></thead>'
        f'<tbody>{rows}</tbody><tfoot><tr><th scope="row">Hyper-parameters</th>{counts}</tr>'
        "</tfoot></table></div>"
    )


def _column_name(contender: Contender) -> str:
    """Return the name of a contender without its regime."""
    first = contender.members[0]
    return first.arm.family if len(contender.members) > 1 else first.plain_name


def _heat_cell(results: StudyResults, contender: Contender | None, low: float, high: float) -> str:
    mean = contender.mean(results.measure) if contender else None
    if contender is None:
        return f'<td class="none">{DASH}</td>'
    runs = contender.runs
    remarks = [
        f"{measure.name.removesuffix(' reward')} {plain(value)}"
        for measure in (FINAL_REWARD, BEST_REWARD)
        if measure is not results.measure and (value := contender.mean(measure)) is not None
    ]
    if collapsed := [run for run in runs if run.collapse_step is not None]:
        first = min(run.collapse_step or 0 for run in collapsed)
        remarks.append(f"{len(collapsed)} of {len(runs)} collapsed, first at {first}")
    if failed := sum(run.state is RunState.FAILED for run in runs):
        remarks.append(f"{failed} of {len(runs)} failed")
    small = f"<small>{'<br>'.join(remarks)}</small>"
    if mean is None:
        return f'<td class="none"><b>{DASH}</b>{small}</td>'
    level = (mean - low) / (high - low) if high > low else 0.5
    return f'<td style="--level:{level:.3f}"><b>{plain(mean)}</b>{small}</td>'


def _hyper_parameters(results: StudyResults, contender: Contender) -> str:
    name = _setting(contender.members[0].arm.changes, "objective.name")
    if name is None:
        name = _setting(results.base, "objective.name")
    found = hyper_parameters(str(name))
    if found is None:
        return DASH
    listed = f"<br><small>{', '.join(found)}</small>" if found else ""
    return f"{len(found)}{listed}"


def _runs_section(results: StudyResults, colors: Colors) -> str:
    heads = "".join(f'<th scope="col">seed {seed}</th>' for seed in results.seeds)
    regime_head = '<th scope="col">Regime</th>' if any(results.regimes) else ""
    rows = ""
    for arm in results.arms:
        name = f"{swatch(colors.of_arm[arm.plain_name])}<span>{text(arm.label)}</span>"
        regime = f"<td>{text(arm.regime_label)}</td>" if regime_head else ""
        cells = "".join(f"<td>{_chip(run)}</td>" for run in arm.runs)
        rows += f'<tr><th scope="row">{name}</th>{regime}{cells}</tr>'
    failures = "".join(_failure(run) for run in results.runs if run.error or run.problems)
    return (
        f'<div class="scroll"><table class="arms"><thead><tr><th scope="col">Arm</th>{regime_head}'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>{failures}"
    )


def _chip(run: StudyRun) -> str:
    shown = run.state.value
    if run.state in (RunState.UNFINISHED, RunState.FAILED):
        planned = DASH if run.steps_planned is None else f"{run.steps_planned:,}"
        shown += f", {run.steps_done:,} of {planned} steps"
    elif run.diverged:
        shown += f", diverged at {run.steps_done:,}"
    elif run.collapse_step is not None:
        shown += f", collapsed at {run.collapse_step:,}"
    return f'<span class="chip {run.state.value}">{text(shown)}</span>'


def _failure(run: StudyRun) -> str:
    problems = "".join(f'<p class="error">{text(problem)}</p>' for problem in run.problems)
    error = f'<p class="error">{text(run.error)}</p>' if run.error else ""
    trace = f"<pre>{text(run.traceback)}</pre>" if run.traceback else ""
    word = "diverged" if run.diverged else "has unreadable files"
    if run.state is RunState.FAILED:
        word = "failed"
    return (
        f"<details open><summary><span>{text(run.arm.label)}, seed {run.seed} {word}</span>"
        "</summary>"
        f"{error}{problems}{trace}</details>"
    )


def _completions_section(results: StudyResults, colors: Colors) -> str:
    """Show completions of each arm's end: numbers alone don't explain why a reward fell."""
    blocks = []
    for arm in results.arms:
        run = next((run for run in arm.runs if run.run and run.run.rollout_files), None)
        if run is None or run.run is None:
            continue
        last = run.run.rollout_files[-1]
        table = sample_table(last.name, read_rollouts(last)[:SAMPLES_SHOWN])
        blocks.append(_of_arm(arm, colors, f", seed {run.seed}", table))
    if not blocks:
        return ""
    hint = '<p class="hint">Completions of the last recorded step.</p>'
    return hint + "\n".join(blocks)


def _settings_section(results: StudyResults, colors: Colors) -> str:
    blocks = "\n".join(_of_arm(arm, colors, "", _origin(results, arm)) for arm in results.arms)
    return f'<code class="command">{text(results.command)}</code>\n{blocks}'


def _origin(results: StudyResults, arm: ArmResult) -> str:
    """Return an arm's changes, and the commit, hardware and folder of each seed."""
    changes = "".join(
        f'<tr><th scope="row"><code>{text(key)}</code></th>'
        f"<td>{text(_shown(_setting(results.base, key)))}</td><td>{text(_shown(value))}</td></tr>"
        for key, value in arm.arm.changes.items()
    )
    table = (
        '<div class="scroll"><table><thead><tr><th scope="col">Key</th>'
        '<th scope="col">Of all arms</th><th scope="col">Of this one</th></tr></thead>'
        f"<tbody>{changes}</tbody></table></div>"
        if changes
        else "<p>No changes to the configuration that all arms share.</p>"
    )
    columns = [
        Column("Seed", [str(run.seed) for run in arm.runs]),
        Column("State", [run.state.value for run in arm.runs]),
        Column("Commit", [_commit(run) for run in arm.runs]),
        Column("Hardware", [hardware(run.environment) for run in arm.runs]),
        Column("Started", [str(run.environment.get("started", DASH)) for run in arm.runs]),
        Column("Folder", [run.folder for run in arm.runs]),
    ]
    words = tuple(column.heading for column in columns)
    known = next((run for run in arm.runs if run.run), None)
    full = ""
    if known is not None and known.run is not None:
        block = settings_block(known.run.config_text, known.run.environment)
        full = _fold(f"Full configuration and environment, seed {known.seed}", block)
    return (
        f"<h4>Differences from the configuration that all arms share</h4>{table}"
        f"<h4>Runs</h4>{_table(columns, words=words)}{full}"
    )


def hardware(environment: Mapping[str, Any]) -> str:
    """Describe the machine of a run."""
    if not environment:
        return DASH
    gpus = environment.get("gpus") or []
    named = ", ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus))
    cores = environment.get("cpu_cores")
    cpu = f"{cores} CPU cores" if cores else str(environment.get("platform", DASH))
    return f"{named}, {cpu}" if named else cpu


def _commit(run: StudyRun) -> str:
    return str(run.environment.get("commit") or DASH)[:12]


def _of_arm(arm: ArmResult, colors: Colors, more: str, inner: str) -> str:
    return details(colors.of_arm[arm.plain_name], f"{arm.arm.label}{more}", inner)


def _setting(values: Mapping[str, Any], key: str) -> Any:
    """Return a value by its dotted key, from a flat or a nested mapping."""
    if key in values:
        return values[key]
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _shown(value: Any) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _fold(title: str, inner: str) -> str:
    return f"<details><summary><span>{text(title)}</span></summary>{inner}</details>"


def _table(
    columns: Sequence[Column],
    *,
    names: Sequence[str] = (),
    words: Sequence[str] = (),
    kind: str = "",
) -> str:
    """Return a table; `names` are row headings in HTML, columns in `words` are text."""
    heads = '<th scope="col">Arm</th>' if names else ""
    heads += "".join(
        f'<th scope="col"{numeric(_is_number(column, words))}>{text(column.heading)}</th>'
        for column in columns
    )
    rows = ""
    for place in range(len(columns[0].cells)):
        name = f'<th scope="row">{names[place]}</th>' if names else ""
        cells = "".join(
            f"<td{numeric(_is_number(column, words))}>{text(column.cells[place])}</td>"
            for column in columns
        )
        rows += f"<tr>{name}{cells}</tr>\n"
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _is_number(column: Column, words: Sequence[str]) -> bool:
    return not any(column.heading.startswith(word) for word in words)


def _plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"
