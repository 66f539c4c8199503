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
from functools import lru_cache
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
MACHINE_KEYS = ("run", "task.path")
"""what a run has from the machine and not from the study"""
MODELS = ("model.name", "training.reference_model")
"""of which only the last part is kept: each machine has its own folder for them"""
SPEED_KEYS = ("training.compile",)
"""what changes how fast a run is, and of its numbers no more than their rounding"""
NAMES = {"model": {"name": "any"}, "task": {"name": "arithmetic"}}
"""without which there is no configuration"""
DATA_KEYS = ("path", "split")
"""of the held-out task: the same problems are a file on one machine, and on the hub for another"""
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

    @property
    def steps(self) -> Mapping[str, Sequence[float | None]]:
        """What is kept of every step."""
        return self.line.get("steps", {})

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return max(map(len, self.steps.values()), default=0)

    def run(self, name: str) -> Run:
        """Return what a run folder would hold of it."""
        rows = [
            {"step": place + 1}
            | {
                key: values[place]
                for key, values in self.steps.items()
                if values[place] is not None
            }
            for place in range(self.num_steps)
        ]
        config = dict(self.line.get("config", {}))
        config["training"] = {"steps": self.num_steps} | dict(config.get("training", {}))
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
    state = file.stat()
    return dict(_read(file, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=1)
def _read(file: Path, _modified: int, _size: int) -> dict[Key, RunRecord]:
    """Read a file once for all jobs that ask whether they are in it."""
    found: dict[Key, RunRecord] = {}
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        if not text.endswith(b"\n") and not _is_json(text):
            continue  # another process is writing the last line, or was killed at it
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
    """Add a finished run if it is not there yet; several processes may do so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        try:
            known = read_records(file)
        except ConfigError:  # the run is kept; whoever reads the file next hears of its bad line
            known = {}
        if RunRecord(line).key in known:
            return  # two machines or processes ran it: the first stays
        out.seek(0)
        end = out.read().rpartition(b"\n")[2]
        if end and not _is_json(end):  # a process was killed while it wrote
            out.truncate(out.tell() - len(end))
            end = b""
        out.write((b"\n" if end else b"") + json.dumps(line).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def step_numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return what is kept of every step; None where a step has no such number."""
    rows = [row for row in rows if row["step"] > 0]  # an evaluation before training has a row
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
    """Return a run's configuration without what belongs to the machine, such as folders."""
    kept = json.loads(json.dumps({key: value for key, value in tree.items() if key != "seed"}))
    for key in MACHINE_KEYS:
        node, last = _table_of(kept, key)
        node.pop(last, None)
    named = [_table_of(kept, key) for key in MODELS]
    named += [(policy, "model") for policy in kept.get("rollout", {}).get("policies", ())]
    for node, last in named:
        if node.get(last) is not None:
            node[last] = Path(node[last]).name
    return kept


def portable_evaluation(held_out: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the held-out reward is measured on, without where its data comes from.

    That is a file, or a split on the hub, of the same problems.
    """
    task = {key: value for key, value in held_out["task"].items() if key not in DATA_KEYS}
    return {**held_out, "task": task}


def _table_of(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the table that has a dotted key, and the key's last part."""
    *tables, last = key.split(".")
    for table in tables:
        tree = tree.get(table, {})
    return tree, last


def refuse_other_configuration(
    record: RunRecord, tree: Mapping[str, Any], held_out: Mapping[str, Any], file: Path
) -> None:
    """Refuse a record that counts as a run of this study, but was made with other settings."""
    then, now = _comparable(record, tree, held_out)
    changed = [
        key for key in {**now, **then} if then.get(key) != now.get(key) and key not in SPEED_KEYS
    ]
    if changed:
        key, name = changed[0], "--".join(map(str, record.key))
        raise ConfigError(
            f"{file} has {name} with another configuration ({key} was {then.get(key)}, now "
            f"{now.get(key)}): choose another --records."
        )


def _comparable(
    record: RunRecord, tree: Mapping[str, Any], held_out: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what can be compared of a record, and of the study."""
    line, now = record.line, portable_tree(tree)
    # the oldest records have no configuration, those after them three of its tables
    recorded = line.get("config") or {"objective": line.get("objective", now["objective"])}
    tables = recorded.keys() | now.keys() if "evaluation" in line else recorded.keys()
    then, found = (
        _resolved({table: each.get(table, {}) for table in sorted(tables)})
        for each in (recorded, now)
    )
    if "config" not in line and record.steps and not record.error:
        then["training.steps"] = record.num_steps
        found["training.steps"] = parse_config({**NAMES, **now}).training.steps
    if "evaluation" in line:
        then |= flatten({"held_out": portable_evaluation(line["evaluation"])})
        found |= flatten({"held_out": portable_evaluation(held_out)})
    return then, found


def _resolved(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return every key of these tables, with its default where it is not set."""
    resolved = flatten(parse_config({**NAMES, **tables}).to_dict())
    return {key: value for key, value in resolved.items() if key.split(".")[0] in tables}
