"""A few completions as a table: what an arm's policy wrote, and what it got for it."""

from collections.abc import Sequence
from typing import Any

from trustbatch.observe.page_parts import DASH, figure, numeric, text

LONGEST_TEXT = 4000
_SAMPLE_HEADINGS = ("Prompt", "Completion", "Answer", "Reward", "Advantage", "Ending", "Sampled by")


def sample_table(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return a few completions of a file with their rewards and provenance."""
    heads = "".join(
        f'<th scope="col"{numeric(heading in ("Reward", "Advantage"))}>{heading}</th>'
        for heading in _SAMPLE_HEADINGS
    )
    body = "\n".join(map(_sample_row, rows))
    step = rows[0].get("step", DASH) if rows else DASH
    return (
        f'<h4>Step {text(step)} <small>{text(name)}</small></h4><div class="scroll">'
        f'<table class="samples"><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _sample_row(row: dict[str, Any]) -> str:
    ending = f"{text(_known(row, 'finish_reason'))}<br>{figure(row.get('tokens'))} tokens"
    origin = [
        f"{_known(row, 'policy')} · version {_known(row, 'version')}",
        f"{_known(row, 'engine')} · {_known(row, 'precision')}",
        f"T {_known(row, 'temperature')} · top-p {_known(row, 'top_p')} · "
        f"top-k {_known(row, 'top_k')}",
        f"mean logp {figure(row.get('mean_behavior_logp'))} ({_known(row, 'logprob_mode')})",
    ]
    return (
        f'<tr><td class="long"><small>{text(_known(row, "prompt_id"))}</small>'
        f"<pre>{_cut(row.get('prompt', ''))}</pre></td>"
        f'<td class="long">{_completion(row)}</td>'
        f'<td class="answer">{_cut(_known(row, "answer"))}</td>'
        f'<td class="number">{figure(row.get("reward"))}</td>'
        f'<td class="number">{figure(row.get("advantage"))}</td>'
        f'<td>{ending}</td><td class="origin">{"<br>".join(map(text, origin))}</td></tr>'
    )


def _completion(row: dict[str, Any]) -> str:
    """Return the completion, or the turns of an episode with their roles."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return f"<pre>{_cut(row.get('completion', ''))}</pre>"
    return "".join(
        f'<div class="turn {"policy" if turn.get("role") == "policy" else "reply"}">'
        f"<small>{text(_known(turn, 'role'))}</small><pre>{_cut(turn.get('text', ''))}</pre></div>"
        for turn in turns
    )


def _known(row: dict[str, Any], key: str) -> Any:
    value = row.get(key)
    return DASH if value is None else value


def _cut(value: object) -> str:
    shown = str(value)
    more = len(shown) - LONGEST_TEXT
    if more <= 0:
        return text(shown)
    return f'{text(shown[:LONGEST_TEXT])}<span class="more"> … {more:,} more characters</span>'
