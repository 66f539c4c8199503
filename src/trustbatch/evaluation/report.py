"""Results as Markdown tables, and pass@k as a self-contained HTML page.

Names of models and tasks are escaped: by `cell` in tables, by `text` in the page.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trustbatch.evaluation.comparison import Comparison
from trustbatch.evaluation.results import EvaluationResults, TaskScores
from trustbatch.evaluation.sample_page import samples_section
from trustbatch.evaluation.statistics import LEVEL, shown_ks
from trustbatch.observe.charts import ChartSpec, Curve, Look, chart_figure
from trustbatch.observe.page_parts import html_page, table, text

PASS_AT_K_READING = (
    "The probability that at least one of k samples is correct; the band is the 95% interval over "
    "problems."
)
_PERCENT = f"{LEVEL:.0%}"


def results_table(results: EvaluationResults) -> str:
    """Return a table of one model's scores, with the sampling settings."""
    headings, rows = _table_of(results)
    return "\n".join(
        [
            f"# {cell(results.model)}",
            "",
            *markdown_table(headings, [list(map(cell, row)) for row in rows], num_words=1),
            "",
            _sampling(results),
            *([""] if (remarks := _remarks(results.scores)) else []),
            *map(cell, remarks),
            "",
        ]
    )


def _table_of(results: EvaluationResults) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a model's scores."""
    ks = [k for k in shown_ks(results.settings["samples"]) if k > 1]
    headings = ["task", "problems", f"mean reward ({_PERCENT} interval)"]
    headings += [f"pass@1 ({_PERCENT} interval)"]
    headings += [*(f"pass@{k}" for k in ks), "truncated", "ungraded", "mean tokens"]
    return headings, [_row(score, ks) for score in results.scores]


def _sampling(results: EvaluationResults) -> str:
    settings = results.settings
    return (
        f"{settings['samples']} samples of each problem at temperature "
        f"{settings['temperature']:g}, top-p {settings['top_p']:g}, at most "
        f"{settings['max_tokens']:,} tokens; seed {settings['seed']}, {settings['engine']} "
        f"engine in {settings['precision']}."
    )


def comparison_table(comparison: Comparison) -> str:
    """Return a table of the differences between two models, with the verdict."""
    headings = ["task", "problems", cell(comparison.first), cell(comparison.second)]
    headings += [f"difference ({_PERCENT} interval)", "p-value"]
    rows = [
        [
            cell(each.task),
            f"{each.num_problems:,}",
            f"{each.first:.3f}",
            f"{each.second:.3f}",
            f"{each.value:+.3f} ({each.low:+.3f} to {each.high:+.3f})",
            f"{each.p_value:.4f}",
        ]
        for each in comparison.differences
    ]
    return "\n".join(
        [
            f"# pass@{comparison.k} of {cell(comparison.first)} and {cell(comparison.second)}",
            "",
            *markdown_table(headings, rows, num_words=1),
            "",
            cell(comparison.verdict),
            "",
        ]
    )


def _row(score: TaskScores, ks: Sequence[int]) -> list[str]:
    first = score.at(1)
    cells = [score.name, f"{score.num_problems:,}", _mean_reward(score)]
    cells.append("-" if first is None else _with_span(first.value, first.low, first.high))
    cells += ["-" if (at := score.at(k)) is None else f"{at.value:.3f}" for k in ks]
    return [
        *cells,
        f"{score.truncated_fraction:.1%}",
        f"{score.num_ungraded:,}",
        f"{score.mean_tokens:,.0f}",
    ]


def _mean_reward(score: TaskScores) -> str:
    value, low, high = score.mean_reward, score.mean_reward_low, score.mean_reward_high
    if value is None or low is None or high is None:
        return "-"
    return _with_span(value, low, high)


def _with_span(value: float, low: float, high: float) -> str:
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _remarks(scores: Sequence[TaskScores]) -> list[str]:
    if not any(score.num_ungraded for score in scores):
        return []
    remarks = [
        "Ungraded samples count neither as correct nor as wrong: pass@k is estimated from the "
        "graded samples, over problems with at least k of them."
    ]
    for score in scores:
        last = score.at(score.num_samples)
        used = 0 if last is None else last.num_problems
        if used < score.num_problems:
            remarks.append(
                f"pass@{score.num_samples} of {score.name} is over {used:,} of "
                f"{score.num_problems:,} problems."
            )
    return remarks


def markdown_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int
) -> list[str]:
    """Return the lines of a table; columns after the first `num_words` are right-aligned."""
    rule = ["---" if place < num_words else "---:" for place in range(len(headings))]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]


def cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.split())


def pass_at_k_page(
    models: Sequence[EvaluationResults], samples: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a page with a table per model, a chart per task with a line per model, and samples.

    `samples` are lines of samples.jsonl.
    """
    scores = [model.scores for model in models]
    names = dict.fromkeys(score.name for each in scores for score in each)
    figures = "\n".join(
        _figure(
            name,
            [(model.model, _find(each, name)) for model, each in zip(models, scores, strict=True)],
        )
        for name in names
    )
    title = " and ".join(model.model for model in models)
    return html_page(
        title=f"{title} · pass@k",
        header=f"<h1>pass@k of {text(title)}</h1>",
        sections=[
            *(_results_section(model, is_alone=len(models) == 1) for model in models),
            f'<section id="charts"><h2>pass@k</h2><p class="hint">{PASS_AT_K_READING}</p>'
            f'<div class="charts">{figures}</div></section>',
            *([samples_section(samples)] if samples else []),
        ],
    )


def _results_section(results: EvaluationResults, *, is_alone: bool) -> str:
    headings, rows = _table_of(results)
    remarks = " ".join([_sampling(results), *_remarks(results.scores)])
    return (
        f"<section><h2>{'Results' if is_alone else text(results.model)}</h2>"
        f"{table(headings, rows, num_words=1)}"
        f'<p class="hint">{text(remarks)}</p></section>'
    )


def _find(scores: Sequence[TaskScores], name: str) -> TaskScores | None:
    return next((score for score in scores if score.name == name), None)


def _figure(name: str, models: Sequence[tuple[str, TaskScores | None]]) -> str:
    curves = [
        Curve(
            number,
            model,
            [float(score.k) for score in scores.pass_at_k],
            [score.value for score in scores.pass_at_k],
            bands=[
                (
                    [score.low for score in scores.pass_at_k],
                    [score.high for score in scores.pass_at_k],
                )
            ],
        )
        for number, (model, scores) in enumerate(models)
        if scores is not None
    ]
    known = [scores for _, scores in models if scores is not None]
    cut = ", ".join(f"{scores.truncated_fraction:.1%}" for scores in known)
    caption = f"{known[0].num_problems:,} problems; truncated: {cut}"
    spec = ChartSpec("pass@k", name, caption, "zero", smoothed=False)
    return chart_figure(spec, curves, Look(x="k"))
