"""The completions of runs as data of a page, which viewer.js shows as a table and as tokens.

A page must stay small enough to open, so texts and token lists have a bound each, spent evenly over
the files of all runs. Files are read one after the other: all of a run may not fit into memory.
"""

import json
import math
import zlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trustbatch.observe.charts import embedded_json
from trustbatch.observe.report_data import Run, number, read_rollouts

TEXT_BYTES = 16_000_000
"""of prompts and completions in a page"""
TOKEN_BYTES = 8_000_000
"""of token lists in a page, compressed"""
TOKEN_NUMBERS = (
    "token_id",
    "behavior_logp",
    "policy_logp",
    "anchor_logp",
    "ratio",
    "weight",
    "kl",
    "entropy",
    "token_version",
)
_ROW_NUMBERS = (
    "sample",
    "reward",
    "advantage",
    "tokens",
    "one_minus_ess",
    "mean_behavior_logp",
    "environment_tokens",
)
_SOURCE = (
    "policy",
    "version",
    "engine",
    "precision",
    "temperature",
    "top_p",
    "top_k",
    "logprob_mode",
)
_GZIP = 31  # zlib's number for data with gzip's header

Record = dict[str, Any]


def viewer(runs: Sequence[Run]) -> str:
    """Return the part of a page that viewer.js turns into the table of all completions."""
    found = ViewerData.of(runs)
    if not found.num_found:
        return "<p>No completions were saved.</p>"
    return (
        f'<p class="hint">{found.extent()}</p>\n<div class="viewer">'
        f"{embedded_json(found.columns())}"
        "<noscript><p>This table needs JavaScript, which this browser has switched off.</p>"
        "</noscript></div>"
    )


@dataclass
class ViewerData:
    """Completions in the order of runs and steps, with the groups and sources they refer to."""

    run_names: list[str]
    groups: list[Record] = field(default_factory=list)
    rows: list[Record] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    """provenance as JSON, and its place"""
    num_found: int = 0
    num_with_tokens: int = 0
    num_tokens_left_out: int = 0
    """completions whose token lists are in the file and not in the page"""
    text_bytes: int = 0
    token_bytes: int = 0

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "ViewerData":
        """Read the completions of runs."""
        data = cls([run.name for run in runs])
        files = [(place, file) for place, run in enumerate(runs) for file in run.rollout_files]
        for done, (place, file) in enumerate(files, 1):
            for records in _groups(read_rollouts(file)):
                data.add(place, records, share=done / len(files))
        return data

    def add(self, run: int, records: list[Record], *, share: float) -> None:
        """Add the samples of a prompt, while the bounds are not ahead of this share of the files.

        What one file leaves is there for the next ones, and a large group delays those after it.
        """
        self.num_found += len(records)
        group = _group(run, records)
        rows = [self._row(record) for record in records]
        size = len(json.dumps([group, rows]))
        if self.text_bytes >= share * TEXT_BYTES or self.text_bytes + size > TEXT_BYTES:
            return
        self.text_bytes += size
        for row in rows:
            row["group"] = len(self.groups)
        self.groups.append(group)
        self.rows += rows
        self._add_tokens(group, [_token_lists(record) for record in records], share)

    def _add_tokens(self, group: Record, lists: list[Record | None], share: float) -> None:
        num_samples = sum(each is not None for each in lists)
        if not num_samples:
            return
        if self.token_bytes < share * TOKEN_BYTES:
            packed = _pack(lists)
            if self.token_bytes + len(packed) <= TOKEN_BYTES:
                group["tokens"] = packed
                self.token_bytes += len(packed)
                self.num_with_tokens += num_samples
                return
        self.num_tokens_left_out += num_samples

    def columns(self) -> Record:
        """Return what viewer.js reads: a list of values per column instead of an object per row."""
        return {
            "runs": self.run_names,
            "sources": [json.loads(source) for source in self.sources],
            "groups": self.groups,
            "columns": {key: [row[key] for row in self.rows] for key in self.rows[0]}
            if self.rows
            else {},
        }

    def extent(self) -> str:
        """Return a sentence on what is in the page, and what was left out."""
        shown = len(self.rows)
        if shown == self.num_found:
            said = f"All {shown:,} recorded completions"
        else:
            said = (
                f"{shown:,} of {self.num_found:,} recorded completions, spread evenly over the "
                "steps (the others are in the run's rollouts folder)"
            )
        if self.num_tokens_left_out:
            total = self.num_with_tokens + self.num_tokens_left_out
            said += (
                f"; the page holds the token lists of {self.num_with_tokens:,} out of {total:,}, "
                "spread evenly over the steps"
            )
        elif not self.num_with_tokens:
            said += ", without token lists"
        return said + ". Choose one to read its tokens."

    def _row(self, record: Record) -> Record:
        source = json.dumps({key: _plain(record.get(key)) for key in _SOURCE})
        return {
            "group": 0,
            "completion": _words(record.get("completion")),
            "finish_reason": _words(record.get("finish_reason")),
            "source": self.sources.setdefault(source, len(self.sources)),
            **{key: _finite(record.get(key)) for key in _ROW_NUMBERS},
            "parts": _parts(record.get("parts")),
            "ungraded": _plain(record.get("ungraded")),
            "turns": _turns(record.get("turns")),
        }


def _groups(records: Iterable[Record]) -> list[list[Record]]:
    """Return the samples of each prompt of a step."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        key = (str(record.get("step")), str(record.get("prompt_id")))
        found.setdefault(key, []).append(record)
    return list(found.values())


def _group(run: int, records: Sequence[Record]) -> Record:
    """Return what the samples of a prompt share."""
    first = records[0]
    seen = first.get("model_prompt")
    return {
        "run": run,
        "step": _finite(first.get("step")),
        "prompt_id": _words(first.get("prompt_id")),
        "prompt": _words(first.get("prompt")),
        "model_prompt": None if seen is None else _words(seen),
        "answer": _plain(first.get("answer")),
    }


def _token_lists(record: Record) -> Record | None:
    """Return a completion's lists of one value per token, or None where it has none."""
    tokens = record.get("token")
    if not isinstance(tokens, list) or not tokens:
        return None
    lists: Record = {"token": [_words(token) for token in tokens]}
    for key in TOKEN_NUMBERS:
        values = record.get(key)
        if isinstance(values, list) and len(values) == len(tokens):
            lists[key] = [_finite(value) for value in values]
    return lists


def _pack(value: object) -> str:
    """Return a value as JSON, compressed: half of the size, and unpacked only when it is opened."""
    packer = zlib.compressobj(wbits=_GZIP)
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    return b64encode(packer.compress(data) + packer.flush()).decode("ascii")


def _finite(value: object) -> float | int | None:
    """Return a number with the digits that a reader can use, or None."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
        return value
    found = number(value)
    return float(f"{found:.5g}") if math.isfinite(found) else None


def _words(value: object) -> str:
    return "" if value is None else str(value)


def _plain(value: object) -> str | float | int | None:
    """Return a number or text; what is neither, as text."""
    if value is None:
        return None
    found = _finite(value)
    return str(value) if found is None else found


def _parts(value: object) -> Record | None:
    """Return the parts of a reward."""
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else None


def _turns(value: object) -> list[Record] | None:
    """Return the turns of an episode, where they have the form of turns."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return None
    return [{key: _words(turn.get(key)) for key in ("role", "text")} for turn in value]
