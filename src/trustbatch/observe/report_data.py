"""The data of the report, read from run folders: metrics, completions, configuration."""

import json
import math
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.observe.status import ENGINE_METRICS
from trustbatch.training.lag_metrics import values_by_lag

_LARGEST_DRAWN = 1e300  # the difference of two larger values overflows
_GZIP = 31  # zlib's number for data with gzip's header
_CHUNK_BYTES = 1 << 16
_MISSING = object()


@dataclass(frozen=True)
class Run:
    """The content of one run folder."""

    name: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    rollout_files: list[Path]
    """of completions, in the order of their steps; `read_rollouts` reads one"""
    problems: list[str] = field(default_factory=list)

    @property
    def steps_done(self) -> int:
        """Number of steps taken, also where a damaged line has lost one."""
        # an evaluation before the first step has a row of its own
        rows = [row for row in self.rows if not _is_evaluation(row)]
        if not rows:
            return 0
        first, last = int(rows[0]["step"]), int(rows[-1]["step"])
        return last + 1 if first == 0 else last

    @property
    def steps_planned(self) -> int | None:
        """Number of steps in the configuration."""
        planned = self.option("training", "steps")
        return planned if isinstance(planned, int) else None

    @property
    def policies(self) -> list[str]:
        """Names of the policies that sampled completions, where there were several."""
        return self._names("policy/", "/share")

    @property
    def engines(self) -> list[str]:
        """Names of the engines with recorded speeds: those in processes of their own."""
        return self._names(ENGINE_METRICS, "/busy_share")

    def by_lag(self, prefix: str) -> dict[int, list[float]]:
        """Return the finite values of a metric per lag, the smallest lag first."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            for lag, value in values_by_lag(row, prefix).items():
                if math.isfinite(number(value)):
                    found.setdefault(lag, []).append(number(value))
        return dict(sorted(found.items()))

    def option(self, table: str, key: str) -> Any:
        """Return a value of the configuration, or None."""
        values = self.config.get(table)
        return values.get(key) if isinstance(values, dict) else None

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Return the steps and values of a metric.

        A step that does not record the metric is left out; one that records null, NaN or an
        infinity holds NaN, which a chart shows as a gap.
        """
        pairs = [
            (float(row["step"]), number(value))
            for row in self.rows
            if (value := _metric(row, key)) is not _MISSING
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def _names(self, prefix: str, suffix: str) -> list[str]:
        """Return the NAMEs of the metrics PREFIX NAME SUFFIX."""
        keys = dict.fromkeys(key for row in self.rows for key in row)
        return [
            key.removeprefix(prefix).removesuffix(suffix)
            for key in keys
            if key.startswith(prefix) and key.endswith(suffix)
        ]


def number(value: object) -> float:
    """Return a finite float, or NaN for anything that a chart can't show."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    if not -_LARGEST_DRAWN <= value <= _LARGEST_DRAWN:
        return math.nan
    return float(value)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read every run folder once, with distinct names."""
    resolved = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if not resolved:
        raise ConfigError("No run folder was given: give at least one folder under runs/.")
    return [
        read_run(folder, name)
        for folder, name in zip(resolved, distinct_names(resolved), strict=True)
    ]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return each folder's name, with as many parents as make it unique."""
    names: list[str] = []
    for folder in folders:
        others = [other for other in folders if other != folder]
        depth = 1
        while depth < len(folder.parts) and any(
            other.parts[-depth:] == folder.parts[-depth:] for other in others
        ):
            depth += 1
        names.append("/".join(folder.parts[-depth:]))
    return names


def read_run(folder: Path, name: str) -> Run:
    """Read one run folder; only its metrics are required."""
    if not folder.is_dir():
        raise ConfigError(
            f"The run folder {folder} does not exist: check the path, or start the run first."
        )
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ConfigError(
            f"The folder {folder} has no metrics.jsonl: give a folder that a training run wrote."
        )
    problems: list[str] = []
    config, config_text = _read_config(folder / "config.toml", problems)
    return Run(
        name=name,
        rows=_read_metrics(metrics, problems),
        config=config,
        config_text=config_text,
        environment=_read_environment(folder / "environment.json", problems),
        rollout_files=_find_rollouts(folder / "rollouts"),
        problems=problems,
    )


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the completions in a file, without those that a killed run left incomplete."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []  # a run that goes on may have removed its oldest file
    if path.suffix == ".gz":
        data = _decompress(data)
    parsed = map(_parse_object, _lines(data.decode("utf-8", errors="replace")))
    return [row for row in parsed if row is not None]


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return row["step"] == 0 and all(key == "step" or key.startswith("eval/") for key in row)


def _metric(row: Mapping[str, Any], key: str) -> Any:
    if key == "one_minus_ess" and key not in row and "ess" in row:
        return 1.0 - number(row["ess"])
    return row.get(key, _MISSING)


def _read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return one row per step; of a repeated step the last row."""
    lines = _lines(_text(path))
    by_step: dict[float, dict[str, Any]] = {}
    damaged = 0
    for index, line in enumerate(lines):
        row = _parse_object(line)
        if row is not None and math.isfinite(step := number(row.get("step"))):
            by_step[step] = row
        elif index < len(lines) - 1:
            # A killed run leaves an incomplete last line, which is not reported.
            damaged += 1
    if damaged:
        problems.append(f"{damaged} unreadable line{'s' * (damaged > 1)} in metrics.jsonl")
    return [by_step[step] for step in sorted(by_step)]


def _read_config(path: Path, problems: list[str]) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        problems.append("no config.toml")
        return {}, ""
    text = _text(path)
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError:
        problems.append("unreadable config.toml")
        return {}, text


def _read_environment(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        problems.append("no environment.json")
        return {}
    found = _parse_object(_text(path))
    if found is None:
        problems.append("unreadable environment.json")
    return found or {}


def _find_rollouts(folder: Path) -> list[Path]:
    """Return one file of completions per step, the compressed one where a step has two."""
    found = sorted(folder.glob("step-*.jsonl")) + sorted(folder.glob("step-*.jsonl.gz"))
    by_step = {path.name.split(".")[0]: path for path in found if path.is_file()}
    return [by_step[step] for step in sorted(by_step, key=lambda step: (len(step), step))]


def _decompress(data: bytes) -> bytes:
    """Return what can be read of gzip data: a killed run leaves an incomplete file."""
    parts: list[bytes] = []
    while data:
        member = zlib.decompressobj(wbits=_GZIP)
        start = 0
        try:
            while start < len(data) and not member.eof:
                parts.append(member.decompress(data[start : start + _CHUNK_BYTES]))
                start += _CHUNK_BYTES
        except zlib.error:
            break
        data = member.unused_data + data[start:]
    return b"".join(parts)


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _text(path: Path) -> str:
    # A killed run may have written half of a character.
    return path.read_text(encoding="utf-8", errors="replace")


def _lines(text: str) -> list[str]:
    # Not splitlines(): a completion may hold U+2028, which JSON does not escape.
    return [line for line in text.split("\n") if line.strip()]
