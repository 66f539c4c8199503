"""The plot of pass@k: one self-contained HTML page, drawn as the report's charts are.

Names of models and tasks pass through `text` before they reach the page.
"""

from collections.abc import Sequence
from html import escape
from importlib import resources

from trustbatch.evaluation.pass_at_k import shown_ks
from trustbatch.evaluation.results import EvaluationResults
from trustbatch.evaluation.scores import TaskScores
from trustbatch.observe.charts import (
    Axis,
    Curve,
    Frame,
    Tick,
    legend,
    line_chart,
    linear_axis,
)
from trustbatch.observe.report import text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
FRAME = Frame(440, 270)


def pass_at_k_page(models: Sequence[EvaluationResults]) -> str:
    """Return a page with a chart for each task, in which each model has a line."""
    scores = [model.scores for model in models]
    names = dict.fromkeys(score.name for each in scores for score in each)
    figures = "\n".join(
        _figure(
            name,
            [(model.model, _named(each, name)) for model, each in zip(models, scores, strict=True)],
        )
        for name in names
    )
    title = " and ".join(model.model for model in models)
    settings = models[0].settings
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY, quote=False)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)} · pass@k</title>",
            f"<style>\n{_stylesheet()}</style>\n</head>\n<body>",
            f"<header><h1>pass@k of {text(title)}</h1></header>\n<main>",
            '<section><p class="hint">The chance that at least one of k samples is right; the band '
            "is the 95% interval over problems. "
            f"{settings['samples']} samples of each problem at temperature "
            f"{settings['temperature']:g}, top-p {settings['top_p']:g}, at most "
            f"{settings['max_tokens']:,} tokens.</p>",
            f'<div class="charts">{figures}</div></section>',
            "</main>\n</body>\n</html>\n",
        ]
    )


def _named(scores: Sequence[TaskScores], name: str) -> TaskScores | None:
    return next((score for score in scores if score.name == name), None)


def _figure(name: str, models: Sequence[tuple[str, TaskScores | None]]) -> str:
    curves = [
        Curve(
            number,
            model,
            [float(score.k) for score in scores.pass_at_k],
            [score.value for score in scores.pass_at_k],
            low=[score.low for score in scores.pass_at_k],
            high=[score.high for score in scores.pass_at_k],
        )
        for number, (model, scores) in enumerate(models)
        if scores is not None
    ]
    known = [scores for _, scores in models if scores is not None]
    num_samples = max(scores.num_samples for scores in known)
    y = linear_axis([0.0, *(value for curve in curves for value in curve.high)])
    cut = ", ".join(f"{scores.truncated_fraction:.1%}" for scores in known)
    caption = f"{known[0].num_problems:,} problems; truncated: {cut}"
    return (
        f'<figure class="card"><figcaption><h3>{text(name)}</h3><p>{caption}</p></figcaption>'
        f"{line_chart(curves, _k_axis(num_samples), y, FRAME, f'pass@k on {name}')}"
        f"{legend([(curve.run, curve.label) for curve in curves])}</figure>"
    )


def _k_axis(num_samples: int) -> Axis:
    ticks = tuple(Tick(float(k), str(k)) for k in shown_ks(num_samples))
    return Axis(1.0, max(float(num_samples), 1.5), ticks, log=True, name="k")


def _stylesheet() -> str:
    return resources.files("trustbatch.observe").joinpath("report.css").read_text(encoding="utf-8")
