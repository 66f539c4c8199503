"""Joining a Ray cluster that is there already: the same run, and nothing listens beyond it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.cluster.test_cluster import assert_same
from tests.support.processes import LOOPBACK, command_line, descendants, listening

import trustbatch
from trustbatch.cluster.ray_runtime import is_loopback
from trustbatch.observe.run_folder import read_metrics
from trustbatch.utils.network import interface_of

if find_spec("ray") is None:  # not imported here: a run does that, with its own settings
    pytest.skip("Ray is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
CONFIG = """
[model]
name = "{model}"
device = "cpu"
[task]
name = "arithmetic"
level = 1
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_tokens = 4
prompts_per_call = 1
{lag}
[training]
steps = 2
learning_rate = 1e-3
[run]
name = "{name}"
folder = "results"
rollouts_every = 1
{cluster}
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of the cluster and of those who join it: one thread, and a token of their own."""
    paths = [str(ROOT / "src"), str(ROOT)]
    return os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


@pytest.fixture(scope="module")
def head(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, str]]:
    """A cluster of four processes at most, started elsewhere; its process and its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [
            *(Path(sys.executable).parent / "ray", "start", "--head", "--block"),
            *("--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}"),
            *("--include-dashboard=false", "--disable-usage-stats", "--num-cpus=4"),
        ],
        env=environment | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        cwd=tmp_path_factory.mktemp("elsewhere"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not raylets(process.pid):
            assert process.poll() is None, "ray start has ended"
            assert time.monotonic() < deadline, "ray start has not started a raylet"
            time.sleep(0.2)
        yield process.pid, address
    finally:
        started = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for pid in started:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def raylets(pid: int) -> list[int]:
    return [
        each for each in descendants(pid) if command_line(each).split(b"\0")[0].endswith(b"/raylet")
    ]


def train(
    folder: Path, model: Path, environment: dict[str, str], *launcher: str, cluster: str = ""
) -> trustbatch.RunResult:
    """Run in a process of its own: Ray reads where it may be reached when it is imported."""
    name = "joined" if cluster else "alone"
    file = folder / f"{name}.toml"
    lag = "" if cluster else "lag = 1"
    file.write_text(CONFIG.format(model=model, name=name, lag=lag, cluster=cluster))
    done = subprocess.run(
        [sys.executable, *(launcher or ("-m", "trustbatch", "train")), str(file)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    path = folder / "results" / name
    return trustbatch.RunResult(
        folder=path, checkpoint=path / "checkpoints" / "step-2", metrics=read_metrics(path)
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainers", "launcher"),
    [
        (1, ()),
        pytest.param(2, (*TORCHRUN, "tests.support.ranks.train"), marks=pytest.mark.long),
    ],
    ids=["one trainer", "two trainers"],
)
def test_a_run_on_a_cluster_that_is_there_is_the_same_and_stays_on_loopback(
    trainers: int,
    launcher: tuple[str, ...],
    head: tuple[int, str],
    environment: dict[str, str],
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    pid, address = head
    expected = train(tmp_path, tiny_folder, environment, *launcher)
    seen: set[tuple[int, str]] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            seen.update(listening(descendants(pid) | descendants(os.getpid())))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        cluster = f'[cluster]\naddress = "{address}"\ntrainers = {trainers}\nengines = 1\n'
        cluster += f"reward_workers = {2 - trainers}\n"
        actual = train(tmp_path, tiny_folder, environment, cluster=cluster)
    finally:
        ended.set()
        watcher.join()
    assert_same(actual, expected)
    assert len(seen) > 4
    assert {where for _, where in seen} <= set(LOOPBACK)


def test_addresses_of_this_machine_alone() -> None:
    assert is_loopback("127.0.0.1:6379")
    assert is_loopback("localhost:6379")
    assert is_loopback("[::1]:6379")
    assert not is_loopback("10.0.0.1:6379")
    assert not is_loopback("auto")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
