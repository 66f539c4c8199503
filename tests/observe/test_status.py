"""status.json and `trustbatch status`: the status of a run, and how a dead run is detected."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support import forked

import trustbatch
from trustbatch.cli import main
from trustbatch.errors import ConfigError
from trustbatch.observe.status import (
    LONGEST_ERROR,
    REWARDS_KEPT,
    EngineStatus,
    RunStatus,
    StatusFile,
    StatusRecord,
    WorkerStatus,
)
from trustbatch.observe.status_view import (
    BAR_WIDTH,
    SILENT_AFTER,
    bar,
    duration,
    judge,
    read_status,
    status_table,
    trend,
)
from trustbatch.utils.terminal import plain_line

STATUS = RunStatus(
    step=3,
    steps=10,
    version=3,
    buffered_batches=1,
    buffer_room=2,
    waiting_for="version 3 of the weights",
    lag_counts={0: 8, 2: 24},
    one_minus_ess_by_lag={0: 1.5e-9, 2: 0.031},
    one_minus_ess_by_cause={"updates": 0.004, "engine_and_lag": 0.0641},
    rewards=[0.1, 0.8, 0.5],
    engines={
        "engine-0": EngineStatus(
            state="busy", busy_share=0.9, tokens_per_second=1234.5, version=3, restarts=1
        ),
        "engine-1": EngineStatus(state="dead", version=2, tokens_per_second=1000.0),
    },
    reward_workers={"grader-0": WorkerStatus(state="idle", busy_share=0.25, restarts=2)},
    trainer_busy_share=0.75,
    generation_busy_share=0.5,
    restarts=3,
    last_error="engine-1 was killed",
)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StatusFile]:
    opened = StatusFile(tmp_path, seconds=0.02)
    yield opened
    opened.close()


def record_of(**changes: Any) -> StatusRecord:
    now = time.time()
    record = StatusRecord(
        **{field: getattr(STATUS, field) for field in asdict(STATUS)},
        state="running",
        pid=os.getpid(),
        host=socket.gethostname(),
        time=now,
        started=now - 30,
        stepped=now - 2,
        seconds_left=70.0,
    )
    return replace(record, **changes)


def write(folder: Path, record: StatusRecord) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text(json.dumps(asdict(record)))
    return folder


def shown(record: StatusRecord) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    console.print(status_table(Path("runs/a"), record, judge(record)))
    return stream.getvalue()


def wait_for(condition: Any, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)


def test_what_is_written_is_read(file: StatusFile, tmp_path: Path) -> None:
    file.update(STATUS)
    record = read_status(tmp_path)
    for field, value in asdict(STATUS).items():
        found = getattr(record, field)
        if field in ("engines", "reward_workers"):
            found = {name: asdict(worker) for name, worker in found.items()}
        assert found == value, field
    assert (record.state, record.pid, record.host) == (
        "running",
        os.getpid(),
        socket.gethostname(),
    )
    assert isinstance(record.engines["engine-0"], EngineStatus)


def test_the_file_stays_young_while_the_run_is_busy(file: StatusFile, tmp_path: Path) -> None:
    file.update(STATUS)
    first = read_status(tmp_path)
    wait_for(lambda: read_status(tmp_path).time > first.time, "a second writing")
    assert read_status(tmp_path).stepped == first.stepped


def test_updates_are_copied_and_written_by_the_clock(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, seconds=3600.0)
    status = replace(STATUS, lag_counts={})
    file.update(status)
    status.step, status.lag_counts[5] = 4, 1
    for _ in range(100):
        file.update(status)
    status.lag_counts[6] = 1
    assert read_status(tmp_path).step == 3  # not yet its time
    file.close("finished")
    assert (read_status(tmp_path).step, read_status(tmp_path).lag_counts) == (4, {5: 1})


def test_a_reader_never_meets_half_a_file(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, seconds=0.0)
    file.update(STATUS)
    for _ in range(300):
        assert read_status(tmp_path).steps == 10
    file.close()


def test_time_left_follows_the_pace_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("trustbatch.observe.status.time.time", lambda: now)
    file = StatusFile(tmp_path, seconds=3600.0)
    file.update(replace(STATUS, step=4))
    assert read_status(tmp_path).seconds_left is None
    now = 1020.0  # two steps in 20 seconds, four to go
    file.update(replace(STATUS, step=6))
    now = 1025.0
    file.close()
    assert read_status(tmp_path).seconds_left == pytest.approx(35.0)
    assert read_status(tmp_path).stepped == 1020.0


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (None, "finished", "engine-1 was killed"),
        (KeyboardInterrupt(), "stopped", "engine-1 was killed"),
        (ConfigError("lower max_tokens"), "failed", "lower max_tokens"),
        (ValueError(), "failed", "ValueError"),
        (ConfigError("x" * 9999), "failed", "x" * LONGEST_ERROR),
    ],
)
def test_the_file_says_how_the_run_ended(
    tmp_path: Path, error: BaseException | None, state: str, words: str
) -> None:
    def run() -> None:
        with StatusFile(tmp_path) as file:
            file.update(STATUS)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    record = read_status(tmp_path)
    assert (record.state, record.last_error) == (state, words)
    assert "status file" not in [thread.name for thread in threading.enumerate()]


def test_the_first_end_counts(tmp_path: Path) -> None:
    file = StatusFile(tmp_path)
    file.close("failed")
    assert not list(tmp_path.iterdir())
    file.update(STATUS)
    file.close("finished")
    file.close("stopped")
    assert read_status(tmp_path).state == "finished"


def test_a_folder_that_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    with StatusFile(tmp_path / "gone", seconds=0.01) as file:
        file.update(STATUS)
        time.sleep(0.05)
        file.update(STATUS)


def test_steps_are_counted_by_lag() -> None:
    status = RunStatus(step=0, steps=9, version=0)
    status.add_step(1, {"rollout/completions/lag_0": 4.0, "one_minus_ess": 1e-9})
    status.add_step(2, {"rollout/completions/lag_1": 4.0, "one_minus_ess/lag_1": 0.1})
    mixed = {"rollout/completions/lag_1": 1.0, "rollout/completions/lag_10": 3.0}
    status.add_step(3, mixed | {"one_minus_ess/lag_1": 0.2, "one_minus_ess/lag_10": 0.3})
    assert (status.step, status.version) == (3, 3)
    assert status.lag_counts == {0: 4, 1: 5, 10: 3}
    assert status.one_minus_ess_by_lag == {0: 1e-9, 1: 0.2, 10: 0.3}
    # what second policies sampled is in the 1-ESS of the whole batch
    status = RunStatus(step=0, steps=9, version=0)
    second = {"policy/other/share": 0.5, "one_minus_ess": 0.4}
    status.add_step(1, {"rollout/completions/lag_0": 4.0} | second)
    assert status.one_minus_ess_by_lag == {}


def test_the_last_rewards_and_the_newest_ledger_are_kept() -> None:
    status = RunStatus(step=0, steps=99, version=0)
    ledger = {
        "ledger/sampling/one_minus_ess": 0.1,
        "ledger/sampling/share": 1.0,
        "ledger/lag/one_minus_ess": 0.0,
        "ledger/position/0-15/one_minus_ess": 0.7,
    }
    status.add_step(1, {"reward/mean": 0.25} | ledger)
    status.add_step(2, {})  # nothing graded, and no ledger
    assert status.rewards == [0.25]
    assert status.one_minus_ess_by_cause == {"sampling": 0.1, "lag": 0.0}
    status.add_step(3, {"ledger/updates/one_minus_ess": 0.2})
    assert status.one_minus_ess_by_cause == {"updates": 0.2}
    for step in range(REWARDS_KEPT):
        status.add_step(4 + step, {"reward/mean": float(step)})
    assert status.rewards == [float(step) for step in range(REWARDS_KEPT)]


def test_trends() -> None:
    assert trend([0.0, 1.0, 0.5, 0.0]).startswith("▁█▅▁  0.000 to 1.000 ")
    assert trend([0.5]) == trend([0.5, 0.5]) == ""


def test_metrics_of_a_status() -> None:
    assert STATUS.metrics() == {
        "cluster/buffered_batches": 1.0,
        "cluster/engine_restarts": 1.0,
        "cluster/reward_restarts": 2.0,
        "time/trainer_busy_share": 0.75,
        "time/generation_busy_share": 0.5,
        "cluster/engine/engine-0/tokens_per_second": 1234.5,
        "cluster/engine/engine-0/busy_share": 0.9,
        "cluster/engine/engine-1/tokens_per_second": 1000.0,
        "cluster/engine/engine-1/busy_share": 0.0,
    }


def test_the_table_shows_everything() -> None:
    text = shown(record_of())
    for words in (
        "runs/a  running  process",
        "3 of 10, 1 min 10 s left, last one 2 s ago",
        "1 of 2 batches waiting",
        "version 3 of the weights",
        "busy 75%",
        "busy 50%, 2,234 tokens/s",
        "25% 8 completions",
        "75% 24 completions",
        "1.5e-09 at lag 0   3.1e-02 at lag 2",
        "0.500  ▁█▅  0.100 to 0.800 in the last 3 steps",
        "off-policy by  engine and lag 0.064, updates 0.004",
        "engine-1 was killed",
        "restarts       3",
    ):
        assert words in text, words
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert lines["engine-0"].split()[3::2] == ["busy", "3", "1,234", "90%", "1"]
    assert lines["engine-1"].split()[3] == "dead"
    assert lines["grader-0"].split()[3::2] == ["idle", "25%", "2"]


def test_nothing_of_the_past_is_shown_as_present() -> None:
    text = shown(record_of(state="finished"))
    assert "waiting for" not in text
    assert "left" not in text
    assert "3 of 10 after 30 s" in text
    assert "gone" in text


def test_an_error_that_quotes_a_model_is_text() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 [red]x[/red] \u202e\n\x9b1A"
    record = record_of(last_error=evil, waiting_for=evil, host=evil)
    record.engines[evil] = EngineStatus()
    text = shown(record)
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)
    assert text.count("␛[2J␛]0;owned␇ [red]x[/red]") == 4
    assert plain_line("é 中 ▏") == "é 中 ▏"


@pytest.mark.parametrize(("seconds", "words"), [
    (4.9, "4 s"), (200, "3 min 20 s"), (18720, "5 h 12 min"), (2 * 86400 + 3 * 3600, "2 d 3 h"),
])  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_bars() -> None:
    assert bar(1.0) == "█" * BAR_WIDTH
    assert (bar(0.5), bar(0.0), bar(1e-9)) == ("█" * (BAR_WIDTH // 2), "", "▏")
    assert max(len(bar(share / 100)) for share in range(101)) == BAR_WIDTH


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("changes", "state", "code", "words"),
    [
        ({}, "running", 0, "process"),
        ({"state": "finished"}, "finished", 0, "0 s ago"),
        ({"state": "stopped"}, "stopped", 1, "the same command continues"),
        ({"state": "failed"}, "failed", 1, "engine-1 was killed"),
        ({"pid": dead_pid}, "dead", 1, "ended without a message; the same command continues"),
        ({"pid": dead_pid, "state": "finished"}, "finished", 0, ""),
        ({"pid": dead_pid, "host": "elsewhere"}, "running", 0, "on elsewhere"),
        ({"time": SILENT_AFTER + 5}, "dead", 1, "no update for 35 s from process"),
        ({"time": SILENT_AFTER - 5}, "running", 0, ""),
        ({"time": SILENT_AFTER + 5, "host": "elsewhere"}, "dead", 1, "on elsewhere"),
    ],
)
def test_the_verdict(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    state: str,
    code: int,
    words: str,
) -> None:
    if "pid" in changes:
        changes = changes | {"pid": changes["pid"]()}
    if "time" in changes:
        changes = changes | {"time": time.time() - changes["time"]}
    run = write(tmp_path / "a", record_of(**changes))
    assert main(["status", str(run)]) == code
    out = " ".join(capsys.readouterr().out.split())
    assert f" {state} " in out
    assert words in out
    # watching a run that has ended returns at once
    if state != "running":
        assert main(["status", str(run), "--watch"]) == code
        assert f" {state} " in " ".join(capsys.readouterr().out.split())


def test_watching_goes_on_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trustbatch.observe.status_view.REFRESH_SECONDS", 0.01)
    file = StatusFile(tmp_path, seconds=0.01)
    file.update(STATUS)
    timer = threading.Timer(0.2, file.close, ["finished"])
    timer.start()
    assert main(["status", str(tmp_path), "--watch"]) == 0
    timer.join()
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize("has_folder", [False, True])
def test_watching_begins_before_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_folder: bool,
) -> None:
    monkeypatch.setattr("trustbatch.observe.status_view.REFRESH_SECONDS", 0.01)
    run = tmp_path / "a"
    if has_folder:
        run.mkdir()
    timer = threading.Timer(0.2, lambda: write(run, record_of(state="finished")))
    timer.start()
    assert main(["status", str(run), "--watch"]) == 0
    timer.join()
    out = capsys.readouterr().out
    assert out.count("waiting for a run to begin in") == 1
    assert "finished" in out


def test_watching_for_a_run_that_never_begins_can_be_interrupted(tmp_path: Path) -> None:
    with forked.command("status", tmp_path / "a", "--watch") as process:
        wait_for(lambda: "waiting" in process.written("stdout"), "the first line")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "does not exist" in errors


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist: check the path, or start the run first."),
        ("", "has no status.json: give the folder of a run"),
        ("{", "was not written by a run of this version: delete it"),
        ('{"step": 1}', "was not written by a run of this version: delete it"),
    ],
)
def test_a_folder_without_a_status_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    run = tmp_path / "a"
    if content is not None:
        run.mkdir()
    if content:
        (run / "status.json").write_text(content)
    assert main(["status", str(run)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_status_needs_no_torch(tmp_path: Path) -> None:
    run = write(tmp_path / "a", record_of(state="finished"))
    script = (
        "import sys; from trustbatch.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script, "status", str(run)], check=True, timeout=60)


def tables(folder: Path, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3, "max_tokens": 3, "lag": 2},
        "training": {"steps": 5, "learning_rate": 1e-2},
        "run": {"name": "run", "folder": str(folder)},
    }
    return {name: {**table, **changes.get(name, {})} for name, table in base.items()}


def test_a_synchronous_run_has_a_status(tiny_folder: Path, tmp_path: Path) -> None:
    result = trustbatch.train(model=tiny_folder, task="arithmetic", **tables(tmp_path))
    record = read_status(result.folder)
    assert (record.state, record.step, record.steps, record.version) == ("finished", 5, 5, 5)
    assert (record.buffered_batches, record.buffer_room) == (0, 2)
    assert record.lag_counts == {0: 6, 1: 6, 2: 18}
    assert record.one_minus_ess_by_lag.keys() == {0, 1, 2}
    assert record.one_minus_ess_by_lag[2] == result.metrics[-1]["one_minus_ess/lag_2"]
    assert record.rewards == [line["reward/mean"] for line in result.metrics]
    (engine,) = record.engines.values()
    seconds = sum(line["time/step_seconds"] for line in result.metrics)
    tokens = sum(
        line["response/length_mean"] * 6 for line in result.metrics
    )  # five batches are sampled, and five are trained on
    assert engine.tokens_per_second == pytest.approx(tokens / seconds)
    trained = sum(line["time/train_seconds"] for line in result.metrics)
    assert record.trainer_busy_share == pytest.approx(trained / seconds)
    assert 0.0 < record.trainer_busy_share + record.generation_busy_share <= 1.0
    for line in result.metrics:
        share = line["time/train_seconds"] / line["time/step_seconds"]
        assert line["time/trainer_busy_share"] == pytest.approx(share)


def test_a_failed_run_says_why(tiny_folder: Path, tmp_path: Path) -> None:
    settings = tables(tmp_path, rollout={"max_tokens": 127})
    with pytest.raises(ConfigError):
        trustbatch.train(model=tiny_folder, task="arithmetic", **settings)
    record = read_status(tmp_path / "run")
    assert record.state == "failed"
    assert "lower max_tokens" in record.last_error


@pytest.mark.slow
def test_a_killed_run_is_dead_and_a_stopped_one_stopped(tiny_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f"[model]\nname = {str(tiny_folder)!r}\n[task]\nname = 'arithmetic'\n[rollout]\n"
        "prompts_per_step = 2\nsamples_per_prompt = 2\nmax_tokens = 3\n[training]\nsteps = 100000\n"
        f"[run]\nfolder = {str(tmp_path)!r}\nname = 'run'\ncheckpoint_every = 100000\n"
    )
    file = tmp_path / "run" / "status.json"
    for number, state in ((signal.SIGKILL, "dead"), (signal.SIGINT, "stopped")):
        file.unlink(missing_ok=True)
        with forked.command("train", config) as process:
            wait_for(
                lambda: file.is_file() and read_status(file.parent).step > 0, "a step", seconds=120
            )
            assert judge(read_status(file.parent)).state == "running"
            process.send_signal(number)
            process.wait(timeout=60)
        assert judge(read_status(file.parent)).state == state
