"""A study in Markdown: question, command, table and verdict, to be included in a document."""

from trustbatch.evaluation.table import cell, markdown_table
from trustbatch.studies.results import StudyResults
from trustbatch.studies.tables import arm_columns
from trustbatch.studies.verdict import StudyVerdict

SUMMARY_FILE = "summary.md"


def study_summary(results: StudyResults, verdict: StudyVerdict) -> str:
    """Return the summary; it names no path but those in the command."""
    arms = results.arms
    has_regimes = len(results.regimes) > 1
    columns = arm_columns(arms)
    headings = ["Arm", *(column.heading for column in columns)]
    rows = [
        [cell(arm.label), *(cell(column.cells[place]) for column in columns)]
        for place, arm in enumerate(arms)
    ]
    if has_regimes:
        headings = ["Regime", *headings]
        rows = [[cell(arm.regime_label), *row] for arm, row in zip(arms, rows, strict=True)]
    seeds = ", ".join(map(str, results.seeds))
    lines = [
        cell(results.question),
        "",
        f"    {' '.join(results.command.split())}",
        "",
        *markdown_table(headings, rows, num_words=1 + has_regimes),
        "",
        f"Scale {cell(results.scale)}; seeds {seeds}; means and, behind \N{PLUS-MINUS SIGN}, "
        "standard deviations over seeds.",
        "",
        f"**{cell(verdict.sentences[0])}** {cell(verdict.sentences[1])}",
    ]
    if verdict.remarks:
        lines += ["", *(f"- {cell(remark)}" for remark in verdict.remarks)]
    return "\n".join(lines) + "\n"
