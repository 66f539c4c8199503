"""What the dashboard shows: the runs and studies below a folder, read again only where they grew.

A folder with metrics.jsonl or status.json is a run, one with study.json a study.
"""

import gzip
import json
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trustbatch.errors import ConfigError
from trustbatch.observe.charts import chart_data
from trustbatch.observe.report_charts import clock_of, run_charts
from trustbatch.observe.report_data import Run, number
from trustbatch.observe.status import FILE_NAME as STATUS_FILE
from trustbatch.observe.status_view import judge, read_status

METRICS_FILE = "metrics.jsonl"
STUDY_FILE = "study.json"
RUNS_PER_PAGE = 50
DEEPEST = 8
"""levels of folders that are searched for runs"""
SCAN_SECONDS = 2.0
"""how long a list of folders is used before they are searched again"""
READERS_KEPT = 24
TAIL_BYTES = 1 << 16
"""of metrics.jsonl, which hold its last line"""
COMPLETIONS_SHOWN = 6
COMPLETIONS_BYTES = 8 << 20
"""of a file of completions that are read at most"""
LONGEST_TEXT = 2000
_SHOWN = {
    "reward": "reward/mean",
    "one_minus_ess": "one_minus_ess",
    "entropy": "entropy",
    "lag": "rollout/lag_mean",
    "tokens_per_second": "time/tokens_per_second",
}
_TEXTS = ("prompt", "completion", "answer", "finish_reason", "policy")
_NUMBERS = ("step", "reward", "advantage", "tokens", "version")


@dataclass(frozen=True)
class Found:
    """A run or a study below the folder."""

    name: str
    """its path below the folder, with slashes"""
    folder: Path
    kind: Literal["run", "study"]
    changed: float
    """when it last wrote, as a Unix time"""
    study: str = ""
    """name of the study that a run belongs to"""


@dataclass
class MetricsReader:
    """The lines of a metrics file; a look at it reads only what was added."""

    file: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    """counts how often the file was replaced, as a resumed run does"""
    _identity: tuple[int, int] | None = None
    _offset: int = 0

    def update(self) -> None:
        """Read what was added since the last look; start again where the file is another one."""
        try:
            with self.file.open("rb") as opened:
                status = os.fstat(opened.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._offset:
                    self._identity, self._offset, self.rows = identity, 0, []
                    self.generation += 1
                opened.seek(self._offset)
                added, newline, _ = opened.read().rpartition(b"\n")
        except OSError:
            return  # the run has not reached its first step, or is another user's
        self._offset += len(added) + len(newline)
        self.rows += [row for line in added.split(b"\n") if (row := _step_row(line))]


class RunsBelow:
    """All runs and studies below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._found: dict[str, Found] = {}
        self._scanned = float("-inf")
        self._readers: OrderedDict[str, MetricsReader] = OrderedDict()

    def all(self) -> dict[str, Found]:
        """Return what was found by name, the newest first."""
        if time.monotonic() - self._scanned > SCAN_SECONDS:
            found = sorted(_search(self.root, self.root), key=lambda each: -each.changed)
            self._found = {each.name: each for each in found}
            self._scanned = time.monotonic()
        return self._found

    def page(self, number: int, query: str) -> dict[str, Any]:
        """Return a page of the list; only its own runs are opened."""
        words = query.lower().split()
        named = [
            each for each in self.all().values() if all(word in each.name.lower() for word in words)
        ]
        first = max(number, 0) * RUNS_PER_PAGE
        return {
            "folder": str(self.root),
            "total": len(named),
            "per_page": RUNS_PER_PAGE,
            "rows": [self._row(each) for each in named[first : first + RUNS_PER_PAGE]],
        }

    def series(self, name: str, *, generation: int, after: int) -> dict[str, Any]:
        """Return the charts of a run's steps, without the first `after` rows of this generation."""
        found = self._run(name)
        reader = self._readers.pop(name, None) or MetricsReader(found.folder / METRICS_FILE)
        self._readers[name] = reader
        while len(self._readers) > READERS_KEPT:
            self._readers.popitem(last=False)
        reader.update()
        is_known = generation == reader.generation and 0 <= after <= len(reader.rows)
        first = after if is_known else 0
        whole, new = _as_run(name, reader.rows), _as_run(name, reader.rows[first:])
        return {
            "generation": reader.generation,
            "first": first,
            "rows": len(reader.rows),
            "clock": clock_of(whole) if new.rows else None,
            "charts": [
                {**chart_data(spec, [curve], look), "reading": spec.reading}
                for spec, curve, look in (run_charts(new) if new.rows else ())
            ],
        }

    def completions(self, name: str) -> list[dict[str, Any]]:
        """Return some completions of the newest file of a run."""
        folder = self._run(name).folder / "rollouts"
        files = [
            each for pattern in ("step-*.jsonl", "step-*.jsonl.gz") for each in folder.glob(pattern)
        ]
        files = [file for file in files if self._is_below(file)]
        newest = max(
            files, key=lambda file: (len(file.name.split(".")[0]), file.name), default=None
        )
        if newest is None:
            return []
        rows = [row for line in _first_lines(newest) if (row := _parsed(line))]
        stride = max(len(rows) // COMPLETIONS_SHOWN, 1)
        return [_shown(row) for row in rows[::stride][:COMPLETIONS_SHOWN]]

    def page_file(self, name: str) -> Path | None:
        """Return the page that a run or a study has written, if it has."""
        found = self.all().get(name)
        if found is None:
            return None
        file = found.folder / ("index.html" if found.kind == "study" else "report.html")
        return file if file.is_file() and self._is_below(file) else None

    def _run(self, name: str) -> Found:
        found = self.all().get(name)
        if found is None or found.kind != "run" or not self._is_below(found.folder / METRICS_FILE):
            raise ConfigError(f"There is no run {name!r}: choose one of the list.")
        return found

    def _is_below(self, file: Path) -> bool:
        """Whether a file really lies below the folder, and is no link out of it."""
        return file.resolve().is_relative_to(self.root)

    def _row(self, found: Found) -> dict[str, Any]:
        row: dict[str, Any] = {"name": found.name, "kind": found.kind, "changed": found.changed}
        row["page"] = self.page_file(found.name) is not None
        if found.kind == "study":
            row["runs"] = sum(each.study == found.name for each in self.all().values())
            return row
        status, metrics = (found.folder / name for name in (STATUS_FILE, METRICS_FILE))
        row |= _state(found.folder) if self._is_below(status) else {"state": "unknown"}
        last = _last_row(metrics) if self._is_below(metrics) else {}
        row.setdefault("step", last.get("step"))
        return row | {key: _finite(last.get(metric)) for key, metric in _SHOWN.items()}


def _search(folder: Path, root: Path, study: str = "", depth: int = 0) -> Iterator[Found]:
    """Yield the runs and studies of a folder; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            listed = {entry.name: entry for entry in entries if not entry.name.startswith(".")}
    except OSError:
        return  # removed in the meantime, or not ours to read
    name = folder.relative_to(root).as_posix()
    written = [listed[each] for each in (METRICS_FILE, STATUS_FILE) if each in listed]
    if written:
        yield Found(name, folder, "run", _changed(written), study)
        return
    if STUDY_FILE in listed:
        yield Found(name, folder, "study", _changed([listed[STUDY_FILE]]))
        study = name
    if depth >= DEEPEST:
        return
    for entry in listed.values():
        if entry.is_dir(follow_symlinks=False):
            yield from _search(folder / entry.name, root, study, depth + 1)


def _changed(entries: list[os.DirEntry[str]]) -> float:
    times = [0.0]
    for entry in entries:
        try:
            times.append(entry.stat().st_mtime)
        except OSError:
            continue  # replaced at this moment: the next look has it
    return max(times)


def _state(folder: Path) -> dict[str, Any]:
    if not (folder / STATUS_FILE).is_file():
        return {"state": "unknown"}
    try:
        record = read_status(folder)
    except ConfigError:
        return {"state": "unknown"}
    verdict = judge(record)
    left = record.seconds_left if verdict.state == "running" else None
    return {
        "state": verdict.state,
        "sentence": verdict.sentence,
        "step": record.step,
        "steps": record.steps,
        "seconds_left": left,
        "error": record.last_error,
    }


def _last_row(file: Path) -> dict[str, Any]:
    """Return the last complete line of a metrics file, without reading the others."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(opened.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            lines = opened.read().split(b"\n")[:-1]
    except OSError:
        return {}
    return next((row for line in reversed(lines) if (row := _step_row(line))), {})


def _first_lines(file: Path) -> list[bytes]:
    """Return the complete lines at the beginning of a file of completions."""
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as opened:
                content = opened.read(COMPLETIONS_BYTES)
        else:
            with file.open("rb") as opened:
                content = opened.read(COMPLETIONS_BYTES)
    except (OSError, EOFError, zlib.error):
        return []  # being written, cut by a kill, or damaged
    return content.split(b"\n")[:-1]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: str(row[key])[:LONGEST_TEXT] for key in _TEXTS if row.get(key) is not None}
    turns = row.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        texts["completion"] = "\n".join(
            f"[{turn.get('role')}] {turn.get('text')}" for turn in turns
        )[:LONGEST_TEXT]
    return texts | {key: _finite(row.get(key)) for key in _NUMBERS}


def _as_run(name: str, rows: list[dict[str, Any]]) -> Run:
    return Run(name=name, rows=rows, config={}, config_text="", environment={}, rollout_files=[])


def _step_row(line: bytes) -> dict[str, Any] | None:
    row = _parsed(line)
    return row if row is not None and _finite(row.get("step")) is not None else None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _finite(value: object) -> float | None:
    found = number(value)
    return None if found != found else found
