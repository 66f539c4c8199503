"""`trustbatch status`: whether a run is alive, and a table of the state of its workers."""

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trustbatch.errors import ConfigError
from trustbatch.observe.status import (
    FILE_NAME,
    EngineStatus,
    RunState,
    StatusRecord,
    WorkerStatus,
)
from trustbatch.utils.terminal import plain_line

SILENT_AFTER = 30.0
"""seconds: thirty times the interval at which a run writes"""
REFRESH_SECONDS = 1.0
BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "running": "bold green",
    "finished": "bold green",
    "stopped": "bold yellow",
    "failed": "bold red",
    "dead": "bold red",
}
_WORKER_STYLES = {"busy": "green", "idle": "", "starting": "yellow", "dead": "red"}


@dataclass(frozen=True)
class Verdict:
    """Whether a run is alive, as a word and as a sentence."""

    state: RunState | Literal["dead"]
    sentence: str

    @property
    def exit_code(self) -> int:
        """0 for a running or finished run, 1 for one that needs attention."""
        return 0 if self.state in ("running", "finished") else 1


def read_status(folder: Path) -> StatusRecord:
    """Read status.json of a run folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"The run folder {folder} does not exist: check the path, or start the run first."
        )
    file = folder / FILE_NAME
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"The folder {folder} has no {FILE_NAME}: give the folder of a run that has reached "
            "its first step, such as runs/NAME."
        ) from None
    try:
        return TypeAdapter(StatusRecord).validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"{file} was not written by a run of this version: delete it, and the run writes it "
            "again."
        ) from error


def judge(record: StatusRecord) -> Verdict:
    """Return whether a run is alive or dead, whatever state the file shows."""
    ago = max(time.time() - record.time, 0.0)
    since = f"{duration(ago)} ago"
    again = "the same command continues from the last checkpoint"
    if record.state == "finished":
        return Verdict("finished", since)
    if record.state == "stopped":
        return Verdict("stopped", f"{since}; {again}")
    if record.state == "failed":
        return Verdict("failed", f"{since}; once the cause is fixed, {again}")
    host = plain_line(record.host)
    if record.host == socket.gethostname() and not _is_alive(record.pid):
        return Verdict("dead", f"process {record.pid} ended without a message; {again}")
    if ago > SILENT_AFTER:
        return Verdict(
            "dead",
            f"no update for {duration(ago)} from process {record.pid} on {host}; "
            f"if that process is gone, {again}",
        )
    return Verdict("running", f"process {record.pid} on {host}")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def show_status(console: Console, folder: Path) -> Verdict:
    """Print the status of a run."""
    record = read_status(folder)
    verdict = judge(record)
    console.print(status_table(folder, record, verdict))
    return verdict


def watch_status(console: Console, folder: Path) -> Verdict:
    """Show the status of a run repeatedly, until it ends or the user interrupts."""
    _wait_for_status(console, folder)
    record = read_status(folder)
    verdict = judge(record)
    with Live(status_table(folder, record, verdict), console=console, auto_refresh=False) as live:
        try:
            while verdict.state == "running":
                time.sleep(REFRESH_SECONDS)
                record = read_status(folder)
                verdict = judge(record)
                live.update(status_table(folder, record, verdict), refresh=True)
        except KeyboardInterrupt:  # stops watching, not the run
            pass
    return verdict


def _wait_for_status(console: Console, folder: Path) -> None:
    """Wait until a run has begun; if the user interrupts, `read_status` says what is missing."""
    file = folder / FILE_NAME
    if file.is_file():
        return
    console.print(f"waiting for a run to begin in {plain_line(str(folder))}", markup=False)
    with suppress(KeyboardInterrupt):
        while not file.is_file():
            time.sleep(REFRESH_SECONDS)


def status_table(folder: Path, record: StatusRecord, verdict: Verdict) -> RenderableType:
    """Return the status as a table for a terminal."""
    is_running = verdict.state == "running"
    head = Text.assemble(
        (plain_line(str(folder)), "bold"),
        "  ",
        (verdict.state, _STYLES[verdict.state]),
        "  ",
        verdict.sentence,
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="cyan", no_wrap=True)
    rows.add_column()
    rows.add_row("step", _step(record, is_running=is_running))
    if record.rewards:
        rows.add_row("reward", f"{record.rewards[-1]:.3f}  {trend(record.rewards)}".rstrip())
    waiting = f"{record.buffered_batches} of {record.buffer_room} batches waiting"
    rows.add_row(
        "buffer", waiting if record.buffer_room else "none: generation and training alternate"
    )
    if record.waiting_for and is_running:
        rows.add_row("waiting for", Text(plain_line(record.waiting_for)))
    rows.add_row("trainer", f"busy {percent(record.trainer_busy_share)}")
    speed = sum(engine.tokens_per_second for engine in record.engines.values())
    rows.add_row(
        "engines", f"busy {percent(record.generation_busy_share)}, {figure(speed)} tokens/s"
    )
    rows.add_row("lag", _lags(record.lag_counts) if record.lag_counts else "nothing trained yet")
    if record.one_minus_ess_by_lag:
        rows.add_row("1-ESS", _ess(record.one_minus_ess_by_lag))
    if record.one_minus_ess_by_cause:
        rows.add_row("off-policy by", Text(_causes(record.one_minus_ess_by_cause)))
    rows.add_row("restarts", str(record.restarts))
    if record.last_error:
        rows.add_row("last error", Text(plain_line(record.last_error), style="red"))
    parts: list[RenderableType] = [head, rows]
    if record.engines:
        parts.append(_workers("engine", record.engines, is_running=is_running))
    if record.reward_workers:
        parts.append(_workers("reward worker", record.reward_workers, is_running=is_running))
    return Group(*parts)


def _step(record: StatusRecord, *, is_running: bool) -> str:
    text = f"{record.step} of {record.steps}"
    if not is_running:
        return f"{text} after {duration(record.time - record.started)}"
    if record.seconds_left is not None:
        text += f", {duration(record.seconds_left)} left"
    what = "last one" if record.step else "started"
    return f"{text}, {what} {duration(max(time.time() - record.stepped, 0.0))} ago"


def _lags(counts: Mapping[int, int]) -> Table:
    """Return a histogram with one bar per lag."""
    total, most = sum(counts.values()), max(counts.values())
    bars = Table.grid(padding=(0, 1))
    bars.add_column(justify="right")
    bars.add_column(style="green", no_wrap=True, width=BAR_WIDTH)
    bars.add_column(justify="right")
    bars.add_column()
    for lag, count in sorted(counts.items()):
        bars.add_row(str(lag), bar(count / most), percent(count / total), f"{count:,} completions")
    return bars


def _ess(by_lag: Mapping[int, float]) -> str:
    return "   ".join(f"{value:.1e} at lag {lag}" for lag, value in sorted(by_lag.items()))


def _causes(by_cause: Mapping[str, float]) -> str:
    """Return the 1-ESS of each cause, the largest first."""
    ordered = sorted(by_cause.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{plain_line(cause).replace('_', ' ')} {value:.2g}" for cause, value in ordered
    )


def _workers(kind: str, workers: Mapping[str, WorkerStatus], *, is_running: bool) -> Table:
    table = Table()
    table.add_column(kind)
    table.add_column("state")
    samples = any(isinstance(worker, EngineStatus) for worker in workers.values())
    for heading in (*(("version", "tokens/s") if samples else ()), "busy", "restarts"):
        table.add_column(heading, justify="right")
    for name, worker in workers.items():
        cells = [percent(worker.busy_share), str(worker.restarts)]
        if isinstance(worker, EngineStatus):
            cells = [str(worker.version), figure(worker.tokens_per_second), *cells]
        state = Text(worker.state, style=_WORKER_STYLES[worker.state]) if is_running else "gone"
        table.add_row(Text(plain_line(name)), state, *cells)
    return table


def bar(share: float) -> str:
    """Return a bar in eighths of a character; a positive share has at least one."""
    eighths = max(round(share * BAR_WIDTH * 8), 1 if share > 0 else 0)
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def trend(values: Sequence[float]) -> str:
    """Return a character per value, between the lowest and the highest, and these two."""
    low, high = min(values), max(values)
    if low == high:
        return ""
    levels = [round((value - low) / (high - low) * (len(_LEVELS) - 1)) for value in values]
    line = "".join(_LEVELS[level] for level in levels)
    return f"{line}  {low:.3f} to {high:.3f} in the last {len(values)} steps"


def percent(share: float) -> str:
    """Format a share as a percentage; a dash for NaN."""
    return f"{share:.0%}" if math.isfinite(share) else "-"


def figure(value: float) -> str:
    """Format a count with separators; a dash for NaN."""
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def duration(seconds: float) -> str:
    """Format a time in its two largest units: 4 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
