"""The plot of pass@k: one self-contained HTML page, drawn as the report's charts are.

Names of models and tasks pass through `text` before they reach the page.
"""

from collections.abc import Sequence

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
from trustbatch.observe.page_parts import html_page, text

FRAME = Frame(440, 270)
PASS_AT_K_READING = (
    "The chance that at least one of k samples is right; the band is the 95% interval over "
    "problems."
)


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
    return html_page(
        title=f"{title} · pass@k",
        header=f"<h1>pass@k of {text(title)}</h1>",
        sections=[
            f'<section><p class="hint">{PASS_AT_K_READING} {settings["samples"]} samples of each '
            f"problem at temperature {settings['temperature']:g}, top-p {settings['top_p']:g}, at "
            f"most {settings['max_tokens']:,} tokens.</p>",
            f'<div class="charts">{figures}</div></section>',
        ],
        is_live=False,
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
        f"{line_chart(curves, k_axis(num_samples), y, FRAME, f'pass@k on {name}')}"
        f"{legend([(curve.run, curve.label) for curve in curves])}</figure>"
    )


def k_axis(num_samples: int) -> Axis:
    """Return the horizontal axis of pass@k, logarithmic, with the powers of two."""
    ticks = tuple(Tick(float(k), str(k)) for k in shown_ks(num_samples))
    return Axis(1.0, max(float(num_samples), 1.5), ticks, log=True, name="k")
