"""Results as Markdown: each score with its interval, and beside it what could mislead."""

from collections.abc import Sequence

from trustbatch.evaluation.comparison import Comparison
from trustbatch.evaluation.intervals import LEVEL
from trustbatch.evaluation.pass_at_k import shown_ks
from trustbatch.evaluation.results import EvaluationResults
from trustbatch.evaluation.scores import Score, TaskScores

_PERCENT = f"{LEVEL:.0%}"


def results_table(results: EvaluationResults) -> str:
    """Return the scores of one model, with the settings that they hold for."""
    scores = results.scores
    settings = results.settings
    ks = [k for k in shown_ks(settings["samples"]) if k > 1]
    headings = ["task", "problems", f"pass@1 ({_PERCENT} interval)"]
    headings += [*(f"pass@{k}" for k in ks), "truncated", "ungraded", "mean tokens"]
    rows = [_row(score, ks) for score in scores]
    return "\n".join(
        [
            f"# {cell(results.model)}",
            "",
            *markdown_table(headings, rows, num_words=1),
            "",
            f"{settings['samples']} samples of each problem at temperature "
            f"{settings['temperature']:g}, top-p {settings['top_p']:g}, at most "
            f"{settings['max_tokens']:,} tokens; seed {settings['seed']}, {settings['engine']} "
            f"engine in {settings['precision']}.",
            *_remarks(scores),
            "",
        ]
    )


def comparison_table(comparison: Comparison) -> str:
    """Return the differences between two models, and the verdict."""
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
    cells = [cell(score.name), f"{score.num_problems:,}"]
    cells.append("-" if first is None else f"{first.value:.3f} ({_span(first)})")
    cells += ["-" if (at := score.at(k)) is None else f"{at.value:.3f}" for k in ks]
    return [
        *cells,
        f"{score.truncated_fraction:.1%}",
        f"{score.num_ungraded:,}",
        f"{score.mean_tokens:,.0f}",
    ]


def _span(score: Score) -> str:
    return f"{score.low:.3f} to {score.high:.3f}"


def _remarks(scores: Sequence[TaskScores]) -> list[str]:
    remarks = []
    if any(score.num_ungraded for score in scores):
        remarks += [
            "",
            "Samples that could not be graded count neither as right nor as wrong: their problem "
            "has that many samples fewer, and pass@k is over problems with at least k graded ones.",
        ]
        for score in scores:
            last = score.at(score.num_samples)
            used = 0 if last is None else last.num_problems
            if used < score.num_problems:
                remarks.append(
                    f"pass@{score.num_samples} of {cell(score.name)} is over {used:,} of "
                    f"{score.num_problems:,} problems."
                )
    return remarks


def markdown_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int
) -> list[str]:
    """Return the lines of a table; columns after the first `num_words` are numbers."""
    rule = ["---" if place < num_words else "---:" for place in range(len(headings))]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]


def cell(text: str) -> str:
    """Keep a name from breaking the table, or from being read as HTML."""
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.split())
