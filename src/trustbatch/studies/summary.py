"""A study in Markdown: question, command, table and verdict, to be included in a document."""

from trustbatch.evaluation.report import cell, markdown_table
from trustbatch.studies.comparisons import table_rows
from trustbatch.studies.results import StudyResults
from trustbatch.studies.tables import Column, arm_columns
from trustbatch.studies.verdict import StudyVerdict

SUMMARY_FILE = "summary.md"


def study_summary(results: StudyResults, verdict: StudyVerdict) -> str:
    """Return the summary; it names no path but those in the command."""
    rows = [row for regime in results.regimes for row in table_rows(results.in_regime(regime))]
    names = [Column("Arm", [row.label for row in rows])]
    if len(results.regimes) > 1:
        names.insert(0, Column("Regime", [row.regime_label for row in rows]))
    columns = [*names, *arm_columns(rows)]
    headings = [cell(column.heading) for column in columns]
    cells = [[cell(column.cells[place]) for column in columns] for place in range(len(rows))]
    seeds = ", ".join(map(str, results.seeds))
    lines = [
        cell(results.question),
        "",
        f"    {' '.join(results.command.split())}",
        "",
        *markdown_table(headings, cells, num_words=len(names)),
        "",
        f"Scale {cell(results.scale)}; seeds {seeds}; means and, behind \N{PLUS-MINUS SIGN}, "
        "standard deviations over seeds, of a mean of several arms over these.",
        "",
        f"**{cell(verdict.sentences[0])}** {cell(verdict.sentences[1])}",
    ]
    if verdict.remarks:
        lines += ["", *(f"- {cell(remark)}" for remark in verdict.remarks)]
    return "\n".join(lines) + "\n"
