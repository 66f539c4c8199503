"""Finished runs in one file, a line of JSON each: a campaign that goes on where it stopped.

A record has a run's configuration, a few numbers of every step, its held-out reward and the commit,
but no weights. So it can be kept beside the code, and the next machine leaves out what is in it.
"""

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.evaluation.mean_reward import EvaluationResult
from trustbatch.observe.report_data import Run
from trustbatch.studies.study import Arm
from trustbatch.utils.tables import flatten

Key = tuple[str, str, int]
"""regime, arm without its regime, and seed"""

KEPT = (
    "reward/mean",
    "entropy",
    "one_minus_ess",
    "ratio/mean",
    "weight/cap",
    "kl/penalty",
    "pull/strength",
    "pull/sequences",
    "ratio/clipped_fraction",
    "gradient/norm",
    "response/length_mean",
    "response/truncated_fraction",
    "time/step_seconds",
)
KEPT_PREFIX = "ledger/"
LEFT_OUT = ("ledger/position/", "ledger/probability/")
"""a hundred numbers a ledger"""
MACHINE_KEYS = ("run", "model.name", "task.path")
"""what a run has from the machine and not from the study"""
NAMES = {"model": {"name": "any"}, "task": {"name": "arithmetic"}}
"""without which there is no configuration"""
COMPARED = ("objective.", "rollout.", "training.")
DIGITS = 5


@dataclass(frozen=True)
class RunRecord:
    """One line of the file."""

    line: Mapping[str, Any]

    @property
    def key(self) -> Key:
        """Which run it is."""
        return self.line["regime"], self.line["arm"], self.line["seed"]

    @property
    def held_out(self) -> EvaluationResult:
        """The reward on held-out prompts after training; 0 where the run diverged."""
        return EvaluationResult(
            mean_reward=self.line["held_out"],
            standard_error=self.line.get("standard_error", 0.0),
            num_prompts=self.line.get("prompts", 0),
            num_samples=self.line.get("samples", 0),
        )

    @property
    def error(self) -> str:
        """Why it diverged; empty if it did not."""
        return self.line.get("failed", "")

    def run(self, name: str) -> Run:
        """Return what a run folder would hold of it."""
        steps: Mapping[str, Sequence[float | None]] = self.line.get("steps", {})
        count = max(map(len, steps.values()), default=0)
        rows = [
            {"step": place + 1}
            | {key: values[place] for key, values in steps.items() if values[place] is not None}
            for place in range(count)
        ]
        config = dict(self.line.get("config", {}))
        config["training"] = {"steps": count} | dict(config.get("training", {}))
        return Run(
            name=name,
            rows=rows,
            config=config,
            config_text=json.dumps(config, indent=1),
            environment={"commit": self.line.get("commit")} | self.line.get("environment", {}),
            rollout_files=[],
        )


def key_of(arm: Arm, seed: int) -> Key:
    """Return the key of an arm with a seed."""
    return arm.regime, arm.plain_name, seed


def read_records(file: Path) -> dict[Key, RunRecord]:
    """Return the records of a file by key; none if it does not exist."""
    if not file.exists():
        return {}
    found: dict[Key, RunRecord] = {}
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = RunRecord(json.loads(text))
            has_value = math.isfinite(record.held_out.mean_reward)
            key = record.key
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"Line {number} of {file} is no record of a run ({error!r}): remove it."
            ) from error
        if not has_value or key in found:
            what = "is there twice" if has_value else "has no held-out reward"
            raise ConfigError(f"{'--'.join(map(str, key))} {what} in {file}: remove line {number}.")
        found[key] = record
    return found


def append_record(file: Path, line: Mapping[str, Any]) -> None:
    """Add a finished run; several processes may do so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        out.write(json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())


def step_numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return what is kept of every step; None where a step has no such number."""
    names = dict.fromkeys(
        key
        for row in rows
        for key in row
        if key in KEPT or (key.startswith(KEPT_PREFIX) and not key.startswith(LEFT_OUT))
    )
    return {name: [_rounded(row.get(name)) for row in rows] for name in names}


def _rounded(value: float | None) -> float | None:
    is_number = value is not None and math.isfinite(value)
    return float(f"{value:.{DIGITS}g}") if is_number else None


def portable_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's configuration without what belongs to the machine: folders and their names."""
    kept = json.loads(json.dumps({key: value for key, value in tree.items() if key != "seed"}))
    for key in MACHINE_KEYS:
        *tables, last = key.split(".")
        node = kept
        for table in tables:
            node = node.get(table, {})
        node.pop(last, None)
    for policy in kept.get("rollout", {}).get("policies", ()):
        policy["model"] = Path(policy["model"]).name
    return kept


def refuse_other_configuration(record: RunRecord, tree: Mapping[str, Any], file: Path) -> None:
    """Refuse a record that counts as a run of this study, but was made with other settings."""
    recorded = record.line.get("config")
    if recorded is None:
        return
    then, now = _compared(recorded), _compared(portable_tree(tree))
    changed = [key for key in now if then.get(key) != now[key]]
    if changed:
        key, name = changed[0], "--".join(map(str, record.key))
        raise ConfigError(
            f"{file} has {name} with another configuration ({key} was {then.get(key)}, now "
            f"{now[key]}): choose another --records."
        )


def _compared(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved keys that make a run what it is."""
    tables = {key: tree[key] for key in ("objective", "rollout", "training") if key in tree}
    tables = {**NAMES, **json.loads(json.dumps(tables))}
    for policy in tables.get("rollout", {}).get("policies", ()):
        policy["model"] = "other"  # its folder may have another name on each machine
    resolved = flatten(parse_config(tables).to_dict())
    return {key: value for key, value in resolved.items() if key.startswith(COMPARED)}
