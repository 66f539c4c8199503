"""An inspection as a self-contained HTML page: tables, heat maps and tokens."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from trustbatch.inspection.result import Inspection, ObjectiveRow, ShownCompletion
from trustbatch.inspection.terminal import estimate, headline, number, signed
from trustbatch.inspection.token_summary import EDGES, QUADRANTS
from trustbatch.observe.page_parts import as_bytes, html_page, text
from trustbatch.utils.files import write_atomically

STYLE = """
.heat td, .heat th { padding: 4px 8px; }
.heat thead th { white-space: normal; }
.heat tbody th { white-space: nowrap; font-weight: 400; }
.heat .own th, tr.own > th { font-weight: 700; }
.cell { background: color-mix(in srgb, var(--hue) calc(var(--depth) * 1%), transparent); }
.bar {
  display: inline-block; width: 90px; height: 8px; margin-left: 8px; vertical-align: middle;
  background: linear-gradient(90deg, transparent var(--from), var(--hue) var(--from),
    var(--hue) var(--to), transparent var(--to)), var(--code);
}
.tokens { margin: 2px 0; font: .8rem/1.7 ui-monospace, Menlo, Consolas, monospace; }
.tokens td { padding: 3px 8px; }
.tokens span { padding: 1px 0; margin-right: 2px; border-radius: 2px; white-space: pre-wrap; }
.up { --hue: #0072b2; } .down { --hue: #d55e00; } .plain { --hue: #009e73; }
"""


def write_page(inspection: Inspection, file: Path) -> None:
    """Write the page."""
    write_atomically(file, as_bytes(inspection_page(inspection)))


def inspection_page(inspection: Inspection) -> str:
    """Return the page."""
    sections = [
        _section("What it says", _sentences(inspection)),
        _section("Tokens", _tokens(inspection)),
        _section("Mean weight by ratio", _weights(inspection)),
    ]
    if inspection.own.gradient is not None:
        sections += [
            _section("Gradients", _gradients(inspection)),
            _section("Cosines of the gradients", _cosines(inspection)),
        ]
    sections += [
        _section(f"A completion with advantage {each.advantage:+.2f}", _tokens_of(inspection, each))
        for each in inspection.completions
    ]
    title = f"Step {inspection.step} of {inspection.run}"
    return html_page(
        title=title,
        header=f"<h1>{text(title)}</h1><p>{text(headline(inspection))}</p>",
        sections=sections,
        style=STYLE,
    )


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{text(title)}</h2>{inner}</section>"


def _hint(words: str) -> str:
    return f'<p class="hint">{text(words)}</p>'


def _sentences(inspection: Inspection) -> str:
    found = "".join(f"<p>{text(sentence)}</p>" for sentence in inspection.findings)
    return found + "".join(_hint(sentence) for sentence in inspection.notes)


def _tokens(inspection: Inspection) -> str:
    def cells(row: ObjectiveRow) -> list[str]:
        tokens = row.tokens
        silenced = [tokens.silenced, *(tokens.silenced_in[name] for name in QUADRANTS)]
        others = [_share(share, "plain") for share in (tokens.capped, tokens.raised)]
        return [*(_share(share, "down") for share in silenced), *others]

    headings = ["silenced", *(f"silenced, {name}" for name in QUADRANTS), "capped", "raised"]
    hint = _hint(
        "Share of the tokens with an advantage. Silenced: the objective gives the advantage next "
        "to no weight. Capped: its weight w is more than 1% below the ratio r; raised: above it."
    )
    return hint + _table(inspection, headings, cells)


def _weights(inspection: Inspection) -> str:
    edges = ["0", *(f"{edge:g}" for edge in EDGES), "∞"]
    bins = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]

    def cells(row: ObjectiveRow) -> list[str]:
        sides = (row.tokens.mean_weight["A>0"], row.tokens.mean_weight["A<0"])
        return [_weight_cell(weight) for side in sides for weight in side]

    headings = [f"A>0, r {name}" for name in bins] + [f"A<0, r {name}" for name in bins]
    shares = ", ".join(
        f"{name}: {share:.1%}" for name, share in zip(bins, inspection.bin_shares, strict=True)
    )
    hint = _hint(
        "Mean weight w of the tokens in each bin of the ratio r; a dash where there is none. "
        f"Share of tokens by r: {shares}."
    )
    return hint + _table(inspection, headings, cells)


def _gradients(inspection: Inspection) -> str:
    own = inspection.own.label
    found = [row.gradient for row in inspection.rows if row.gradient is not None]
    drifts = [each.entropy_drift for each in found if each.entropy_drift is not None]
    widest = max((abs(each.value) for each in drifts), default=0.0) or 1.0

    def cells(row: ObjectiveRow) -> list[str]:
        gradient = row.gradient
        assert gradient is not None, "all rows have one, or none has"
        drift = gradient.entropy_drift
        bar = "" if drift is None else _bar(drift.value / widest)
        return [
            _cell(f"{gradient.norm:.3g}"),
            _cosine_cell(gradient.cosines[own]),
            _cell(estimate(gradient.fresh_cosine)),
            f'<td class="number">{text(signed(drift))}{bar}</td>',
            _cell(signed(gradient.drift_beyond_unclipped)),
            _cell(number(gradient.learning_rate_factor)),
        ]

    headings = ["norm", f"cosine to {own}", "cosine to fresh", "entropy drift"]
    headings += ["beyond unclipped", "learning rate times"]
    hint = _hint(
        "Entropy drift: the first-order change of the policy's mean entropy on fresh tokens, in "
        "nats, for a step of length 1 against the gradient; beyond unclipped: minus that of r A. "
        "± is the standard error over the parts of the fresh rollouts."
    )
    return hint + _table(inspection, headings, cells)


def _cosines(inspection: Inspection) -> str:
    def cells(row: ObjectiveRow) -> list[str]:
        assert row.gradient is not None, "all rows have one, or none has"
        return [_cosine_cell(row.gradient.cosines[other.label]) for other in inspection.rows]

    return _table(inspection, [row.label for row in inspection.rows], cells)


def _tokens_of(inspection: Inspection, completion: ShownCompletion) -> str:
    rows = [_token_row("ratio r", [(each.text, each.ratio) for each in completion.tokens])]
    for index, row in enumerate(inspection.rows):
        weights = [(each.text, each.weights[index]) for each in completion.tokens]
        rows.append(_token_row(row.label, weights))
    more = (
        f" {completion.num_left_out} more tokens are left out." if completion.num_left_out else ""
    )
    hint = _hint(
        "Each token by its weight: blue above 1, orange below it, gray where it is silenced or has "
        f"none; the number is in the tooltip.{more}"
    )
    return f'{hint}<div class="scroll"><table class="tokens">{"".join(rows)}</table></div>'


def _token_row(label: str, tokens: Sequence[tuple[str, float]]) -> str:
    # a line may break between tokens, whatever their text
    spans = "<wbr>".join(_token_span(shown, weight) for shown, weight in tokens)
    return f'<tr><th scope="row">{text(label)}</th><td>{spans}</td></tr>'


def _token_span(shown: str, weight: float) -> str:
    visible = text(shown.replace("\n", "⏎").replace("\t", "⇥")) or "∅"
    title = f"w {number(weight)}"
    if not math.isfinite(weight) or abs(weight) < 1e-3:
        return f'<span title="{title}" style="opacity:.35">{visible}</span>'
    depth = min(abs(math.log2(max(weight, 2**-4))) * 35, 70)
    side = "up" if weight > 1 else "down"
    return f'<span class="cell {side}" title="{title}" style="--depth:{depth:.0f}">{visible}</span>'


def _table(
    inspection: Inspection, headings: Sequence[str], cells: Callable[[ObjectiveRow], list[str]]
) -> str:
    head = "".join(f'<th class="number" scope="col">{text(each)}</th>' for each in headings)
    body = "".join(
        f'<tr{" class=own" if row.is_own else ""}><th scope="row">{text(row.label)}</th>'
        f"{''.join(cells(row))}</tr>"
        for row in inspection.rows
    )
    return (
        f'<div class="scroll"><table class="heat"><thead><tr><th scope="col">objective</th>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(shown: str, hue: str = "plain", depth: float = 0.0) -> str:
    return f'<td class="number cell {hue}" style="--depth:{depth:.0f}">{text(shown)}</td>'


def _share(share: float, hue: str) -> str:
    return _cell(f"{share:.1%}" if share else "0", hue, min(share * 300, 70))


def _weight_cell(weight: float) -> str:
    if not math.isfinite(weight):
        return _cell(number(weight))
    depth = min(abs(math.log2(max(weight, 2**-4))) * 20, 70)
    return _cell(number(weight, 2), "up" if weight > 1 else "down", depth)


def _cosine_cell(value: float) -> str:
    depth = 0.0 if not math.isfinite(value) else 70 * abs(value) ** 3
    return _cell(number(value), "up" if value > 0 else "down", depth)


def _bar(share: float) -> str:
    """Return a bar from the middle, to the right for a positive share of its half."""
    start, end = sorted((50.0, 50.0 + 50.0 * max(-1.0, min(share, 1.0))))
    side = "up" if share > 0 else "down"
    return f'<span class="bar {side}" style="--from:{start:.0f}%;--to:{end:.0f}%"></span>'
