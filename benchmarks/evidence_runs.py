"""Runs that are kept as lines, and what their objectives and regimes are called on a page."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

REGIMES = {
    "fresh": "T = 1",
    "t1.2": "T = 1.2",
    "t0.6": "T = 0.6",
    "top-p0.95": "top-p 0.95",
    "lag2": "lag 2",
    "lag8": "lag 8",
    "t1.2-lag4": "T = 1.2, lag 4",
    "fp8": "FP8",
    "fp8-kv": "FP8 keys and values",
    "mixed50": "half foreign",
    "mixed25": "25% foreign",
}
LABELS = {
    "pact": "PACT",
    "both": "PACT",
    "pact-rms": "rms(A), to both",
    "both-rms": "rms(A), to both",
    "prox": "PACT, to the proximal policy",
    "model": "PACT, to the model",
    "prox-rms": "rms(A), to the proximal policy",
    "both-0.3": "0.3, to both",
    "both-1": "1, to both",
    "prox-0.3": "0.3, to the proximal policy",
    "prox-1": "1, to the proximal policy",
    "model-0.3": "0.3, to the model",
    "model-1": "1, to the model",
    "p3o": "P3O",
    "p3o-model": "P3O",
    "p3o-sampler": "P3O, to the sampler",
    "p3o-no-kl": "P3O without KL",
    "two-anchor": "two-anchor",
    "grpo": "GRPO",
    "grpo-0.2": "GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "decoupled": "decoupled",
    "token-tis": "GRPO, token TIS",
    "sequence-mis": "GRPO, sequence MIS",
    "dppo": "DPPO",
    "m2po": "M2PO",
    "vespo": "VESPO",
    "vcpo": "VCPO",
}

CAMPAIGN = tuple(REGIMES)[:10]
"""the regimes that docs/evidence.md plans for the real model"""

Row = Mapping[str, Mapping[int, float]]
"""held-out reward of an arm by regime and seed"""


def read_rows(file: Path) -> dict[str, Row]:
    """Return the runs of a file by arm, the arms in the order of LABELS."""
    rows: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in file.read_text().splitlines():
        run = json.loads(line)
        rows[run["arm"]][run["regime"]][run["seed"]] = run["held_out"]
    return {
        arm: {regime: dict(sorted(rows[arm][regime].items())) for regime in _in_order(rows[arm])}
        for arm in sorted(rows, key=list(LABELS).index)
    }


def shown_regimes(rows: Mapping[str, Row]) -> list[str]:
    """Return the regimes that an arm has runs in, in the order of REGIMES."""
    return _in_order(regime for row in rows.values() for regime in row)


def means_over_seeds(row: Row) -> list[float]:
    """Return the mean over seeds of each regime that an arm has runs in."""
    return [sum(seeds.values()) / len(seeds) for seeds in row.values()]


def mean_over_regimes(row: Row) -> float:
    """Return the mean over an arm's regimes of its means over seeds."""
    return sum(means_over_seeds(row)) / len(row)


def _in_order(regimes: Iterable[str]) -> list[str]:
    return sorted(set(regimes), key=list(REGIMES).index)


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as the lines of a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
