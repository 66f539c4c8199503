"""The tokens of a step as they were logged: enough for the weights, not for a gradient."""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trustbatch.errors import ConfigError
from trustbatch.inspection.token_summary import TokenTable, token_table
from trustbatch.objectives import TokenBatch


@dataclass(frozen=True)
class LoggedTokens:
    """The tokens of the completions that were logged with them."""

    batch: TokenBatch
    table: TokenTable
    texts: list[str]
    """[T] each token as text"""
    num_completions: int
    has_anchor: bool


def read_logged(file: Path) -> LoggedTokens | None:
    """Read a file of completions; None if none of them has its tokens."""
    records = [
        record
        for record in _records(file)
        if record.get("policy_logp") and record.get("advantage") is not None
    ]
    if not records:
        return None
    try:
        columns = [_columns(number, record) for number, record in enumerate(records)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} has completions without what a token needs ({error}): choose another step "
            "with --step."
        ) from error
    rows = {name: [v for each in columns for v in each[name]] for name in columns[0]}
    if not rows["logp"]:
        return None
    has_anchor = all(value is not None for value in rows["anchor_logp"])
    logp, sequence = _floats(rows["logp"]), torch.tensor(rows["sequence"])
    batch = TokenBatch(
        logp=logp,
        behavior_logp=_floats(rows["behavior_logp"]),
        advantage=_floats(rows["advantage"]),
        sequence=sequence,
        proximal_logp=logp.clone(),  # the policy before the update
        anchor_logp=_floats(rows["anchor_logp"]) if has_anchor else None,
        source=_numbered(rows["source"]),
    )
    return LoggedTokens(
        batch=batch,
        table=token_table([batch], sequence=sequence, token_ids=torch.tensor(rows["token_id"])),
        texts=rows["token"],
        num_completions=len(records),
        has_anchor=has_anchor,
    )


def _records(file: Path) -> list[dict[str, Any]]:
    try:
        raw = file.read_bytes()
        text = gzip.decompress(raw) if file.suffix == ".gz" else raw
        lines = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{file} can't be read ({error}): choose another step with --step."
        ) from error
    return [line for line in lines if isinstance(line, dict)]


def _columns(number: int, record: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return one list a field, of the tokens that the policy sampled and that were measured."""
    count = len(record["policy_logp"])
    versions = record.get("token_version") or [record["version"]] * count
    values = {
        "logp": record["policy_logp"],
        "behavior_logp": record["behavior_logp"],
        "anchor_logp": record.get("anchor_logp") or [None] * count,
        "token": record["token"],
        "token_id": record["token_id"],
        "sequence": [number] * count,
        "advantage": [float(record["advantage"])] * count,
        "source": [(str(record["policy"]), version) for version in versions],
    }
    measured = [
        None not in pair for pair in zip(values["logp"], values["behavior_logp"], strict=True)
    ]
    return {
        name: [value for value, has in zip(column, measured, strict=True) if has]
        for name, column in values.items()
    }


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _numbered(sources: Sequence[tuple[str, int]]) -> Tensor:
    """Return the number of each pair of policy and version among all of them."""
    numbers = {source: number for number, source in enumerate(sorted(set(sources)))}
    return torch.tensor([numbers[source] for source in sources])
