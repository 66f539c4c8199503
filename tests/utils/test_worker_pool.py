"""The pool of grading processes, with real ones that sleep, die, and eat memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import pool_graders

from trustbatch.errors import ConfigError, RewardError
from trustbatch.types import GradeStatus
from trustbatch.utils import worker_pool as pool_module
from trustbatch.utils.worker import WorkerSetup
from trustbatch.utils.worker_pool import NotPortable, WorkerPool
from trustbatch.utils.worker_process import WorkerProcess

LIMIT = 1.5


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    found = WorkerPool(pool_graders.grade, workers=2, time_limit=LIMIT, memory_limit_gib=0.5)
    yield found
    found.close()


def alive(pid: int) -> bool:
    """Whether a process is running, and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pids: list[int], *, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def pids(pool: WorkerPool) -> list[int]:
    return [process._process.pid for process in pool._processes]


@pytest.mark.parametrize(
    ("what", "status", "reason"),
    [
        ("raise", GradeStatus.FAILED, "ValueError: no such answer"),
        ("exit", GradeStatus.FAILED, "its process ended with exit code 3 while it graded"),
        ("sysexit", GradeStatus.FAILED, "SystemExit: enough"),
        ("kill", GradeStatus.FAILED, "was killed by SIGKILL"),
        ("memory", GradeStatus.OUT_OF_MEMORY, "more memory than allowed"),
        ("recursion", GradeStatus.FAILED, "RecursionError"),
        ("sleep", GradeStatus.TIMED_OUT, "it took longer than 1.5 seconds"),
        ("spin", GradeStatus.TIMED_OUT, "it took longer than 1.5 seconds"),
        ("input", GradeStatus.FAILED, "EOFError"),
    ],
)
def test_failures_have_a_status_and_a_reason(
    pool: WorkerPool, what: str, status: GradeStatus, reason: str
) -> None:
    bad, good = pool.run([what, "ok"])
    assert bad.status is status
    assert reason in bad.reason
    assert bad.value is None
    assert (good.status, good.value) == (GradeStatus.GRADED, 1.0)


def test_output_of_a_grader_is_ignored(pool: WorkerPool) -> None:
    assert [outcome.value for outcome in pool.run(["print"] * 4)] == [1.0] * 4


def test_processes_do_not_load_torch_and_start_quickly(pool: WorkerPool) -> None:
    assert [outcome.value for outcome in pool.run(["torch"] * 4)] == [0.0] * 4
    assert pool.run([]) == []


def test_a_hanging_grader_delays_no_other(pool: WorkerPool) -> None:
    pool.run(["ok", "ok"])
    started = time.monotonic()
    done: dict[int, float] = {}
    wait = pool._wait

    def timed() -> list[tuple[int, object]]:
        found = wait()
        done.update({number: time.monotonic() - started for number, _ in found})
        return found  # type: ignore[return-value]

    pool._wait = timed  # type: ignore[method-assign]
    try:
        outcomes = pool.run(["sleep", *["ok"] * 200])
    finally:
        del pool._wait
    assert outcomes[0].status is GradeStatus.TIMED_OUT
    assert all(outcome.status is GradeStatus.GRADED for outcome in outcomes[1:])
    assert max(done[number] for number in range(1, 201)) < done[0]
    assert LIMIT <= done[0] < LIMIT + 1.0


def test_a_pool_of_hanging_graders_still_ends(pool: WorkerPool) -> None:
    started = time.monotonic()
    outcomes = pool.run(["sleep", "spin", "ok", "sleep", "ok"])
    statuses = [outcome.status.value for outcome in outcomes]
    assert statuses == ["timed_out", "timed_out", "graded", "timed_out", "graded"]
    assert time.monotonic() - started < 2 * LIMIT + 3.0


def test_progress_of_slow_batches_is_logged(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "PROGRESS_INTERVAL", 0.3)
    pool.run(["sleep", "ok"])
    assert "Graded 1 of 2 completions." in caplog.text


def test_a_process_that_died_idle_is_replaced(pool: WorkerPool) -> None:
    pool.run(["ok", "ok"])
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
        assert gone([pid])
    assert [outcome.value for outcome in pool.run(["ok"] * 5)] == [1.0] * 5


def wait_for(condition: Callable[[], bool], *, within: float = 30.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_started_ahead_load_while_nothing_waits(tmp_path: Path) -> None:
    function = pool_graders.LoadsWhenAllowed(tmp_path)
    pool = WorkerPool(function, workers=2, time_limit=30, memory_limit_gib=1)
    pool.start(1)
    assert len(pids(pool)) == 1
    pool.start(8)
    started = pids(pool)
    assert len(started) == 2
    (tmp_path / "go").touch()
    wait_for(lambda: len(list(tmp_path.glob("loaded-*"))) == 2)
    assert [outcome.value for outcome in pool.run(["ok"] * 4)] == [1.0] * 4
    assert pids(pool) == started
    pool.close()
    assert gone(started)


def test_a_start_ahead_counts_against_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "START_TIMEOUT", 2.0)
    function = pool_graders.LoadsWhenAllowed(tmp_path)
    pool = WorkerPool(function, workers=1, time_limit=2.0, memory_limit_gib=1)
    pool.start(1)
    started = pids(pool)
    time.sleep(2.5)
    (tmp_path / "go").touch()
    (outcome,) = pool.run(["ok"])
    assert (outcome.status, pids(pool)) == (GradeStatus.GRADED, started)
    pool.close()


def test_all_processes_come_up_before_one_is_sent_a_large_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool(pool_graders.grade, workers=3, time_limit=30, memory_limit_gib=1)
    started: list[int] = []
    load = WorkerProcess.load

    def noting(self: WorkerProcess, setup: WorkerSetup) -> None:
        started.append(len(pool._processes))
        load(self, setup)

    monkeypatch.setattr(WorkerProcess, "load", noting)
    pool.start(3)
    assert started == [3, 3, 3]
    pool.close()


def test_closing_ends_all_processes() -> None:
    pool = WorkerPool(pool_graders.grade, workers=2, time_limit=30, memory_limit_gib=1)
    pool.run(["ok"] * 4)
    started = pids(pool)
    assert len(started) == 2
    pool.close()
    assert gone(started)


def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    """Also in the middle of a loop in C, where nothing of Python runs."""
    script = """
import sys, threading, time
from tests.support import pool_graders
from trustbatch.utils.worker_pool import WorkerPool
pool = WorkerPool(pool_graders.grade, workers=2, time_limit=60, memory_limit_gib=1)
pool.run(["ok", "ok"])
print(*[process._process.pid for process in pool._processes], flush=True)
pool.run(["spin", "sleep"])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        started = [int(pid) for pid in process.stdout.readline().split()]
        assert len(started) == 2
        time.sleep(0.3)
        assert all(map(alive, started))
        process.kill()
    assert gone(started)


def test_what_a_grader_has_started_is_killed_with_it(tmp_path: Path) -> None:
    pool = WorkerPool(pool_graders.start_child, workers=1, time_limit=1.0, memory_limit_gib=1)
    note = tmp_path / "pid"
    (outcome,) = pool.run([str(note)])
    assert outcome.status is GradeStatus.TIMED_OUT
    assert gone([int(note.read_text())])
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's subreaper")
@pytest.mark.parametrize("end", ["close", "death"])
def test_a_daemon_of_a_grader_ends_with_its_process(end: str, tmp_path: Path) -> None:
    grade = pool_graders.start_daemon if end == "close" else pool_graders.start_daemon_and_die
    pool = WorkerPool(grade, workers=1, time_limit=20.0, memory_limit_gib=1)
    note = tmp_path / "pid"
    (outcome,) = pool.run([str(note)])
    daemon = int(note.read_text())
    if end == "close":
        assert outcome.status is GradeStatus.GRADED
        assert alive(daemon)
        pool.close()
    else:
        assert outcome.reason == "its process ended with exit code 3 while it graded"
    assert gone([daemon])
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's subreaper")
def test_a_daemon_of_a_grader_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    script = """
import sys, time
from tests.support import pool_graders
from trustbatch.utils.worker_pool import WorkerPool
pool = WorkerPool(pool_graders.start_daemon, workers=1, time_limit=60, memory_limit_gib=1)
pool.run(sys.argv[1:])
print("started", flush=True)
time.sleep(1e6)
"""
    note = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, str(note)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert alive(int(note.read_text()))
        process.kill()
    assert gone([int(note.read_text())])


def test_graders_have_no_secrets_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "XY_SECRET", "RAY_AUTH_TOKEN")
    for name in (*secrets, "XY_ASKED_FOR"):
        monkeypatch.setenv(name, "1")
    limits: dict[str, Any] = {"workers": 1, "time_limit": 20.0, "memory_limit_gib": 1}
    pool = WorkerPool(pool_graders.variables, **limits, environment=("XY_ASKED_FOR",))
    (everything,) = pool.run([""])
    pool.close()
    names = everything.value.split()
    assert {"PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS", "XY_ASKED_FOR"} <= set(names)
    assert not set(secrets) & set(names)
    with pytest.raises(
        ConfigError, match=r"reward\.environment names XY_NOT_SET, which is not set"
    ):
        WorkerPool(pool_graders.variables, **limits, environment=("XY_NOT_SET",))


def memory_cgroup() -> Path | None:
    """A new control group that allows 300 MiB, where this machine lets us make one."""
    group = Path("/sys/fs/cgroup/memory") / f"trustbatch-test-{os.getpid()}"
    limit = "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group, limit = Path("/sys/fs/cgroup") / group.name, "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(300 * 2**20))
    except OSError:
        return None
    return group


def test_want_of_memory_is_said_where_the_kernel_has_killed_for_it(pool: WorkerPool) -> None:
    by_hand, _ = pool.run(["kill", "ok"])
    assert by_hand.reason == (
        "its process was killed by SIGKILL (by the kernel if memory ran out, by a job scheduler or "
        "by hand) while it graded"
    )
    group = memory_cgroup()
    if group is None:
        pytest.skip("no control group of memory can be made here")
    script = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from tests.support import pool_graders
from trustbatch.utils.worker_pool import WorkerPool
pool = WorkerPool(pool_graders.eat_memory, workers=1, time_limit=60, memory_limit_gib=8)
print(pool.run([1000])[0].reason)
pool.close()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        command = [sys.executable, "-c", script, str(group)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    finally:
        group.rmdir()
    assert done.stdout == (
        "its process was killed by SIGKILL when the machine's memory ran out while it graded\n"
    )


def test_graders_that_cannot_be_sent_are_refused() -> None:
    local: Callable[[str], float] = lambda _: 1.0  # noqa: E731
    with pytest.raises(NotPortable, match="lambda"):
        WorkerPool(local, workers=1, time_limit=1.0, memory_limit_gib=1)
    pool = WorkerPool(pool_graders.Unloadable(), workers=2, time_limit=1.0, memory_limit_gib=1)
    with pytest.raises(NotPortable, match="RuntimeError: not here"):
        pool.run(["ok"])
    pool.close()


def test_what_failed_ahead_fails_again_where_it_is_used() -> None:
    for function, error, sentence in (
        (pool_graders.Unloadable(), NotPortable, "RuntimeError: not here"),
        (pool_graders.DiesAtStart(), RewardError, "3 grading processes in a row ended with exit"),
    ):
        pool = WorkerPool(function, workers=4, time_limit=1.0, memory_limit_gib=1)
        pool.start(4)
        wait_for(lambda pool=pool: all(process.has_ended for process in pool._processes))
        with pytest.raises(error, match=sentence):
            pool.run(["ok"] * 4)
        pool.close()


def test_processes_that_never_become_ready_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool(pool_graders.DiesAtStart(), workers=1, time_limit=1.0, memory_limit_gib=1)
    with pytest.raises(RewardError, match="3 grading processes in a row ended with exit code 7"):
        pool.run(["ok"])
    pool.close()
    monkeypatch.setattr(pool_module, "START_TIMEOUT", 0.5)
    pool = WorkerPool(pool_graders.SleepsAtStart(), workers=1, time_limit=1.0, memory_limit_gib=1)
    with pytest.raises(RewardError, match="did not load the grader within"):
        pool.run(["ok"])
    pool.close()
