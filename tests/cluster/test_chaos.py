"""Clusters whose processes are killed again and again train on what undisturbed ones do."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.processes import command_line, descendants
from tests.support.reliability import Record
from tests.support.rollout_files import read_rollouts

from trustbatch.observe.run_folder import read_metrics

if find_spec("ray") is None:  # not imported here: a run does that, with its own settings
    pytest.skip("Ray is not installed", allow_module_level=True)

CONFIG = """
[model]
name = {model!r}
device = "cpu"
[task]
name = "arithmetic"
level = 1
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
max_tokens = 2
prompts_per_call = 1
[training]
steps = {steps}
learning_rate = 1e-3
[run]
folder = {folder!r}
checkpoint_every = 10
rollouts_every = 1
"""
CLUSTER = """
[cluster]
engines = 2
reward_workers = 1
max_lag = 2
max_restarts = 20
"""
TRAINERS = """
[cluster]
trainers = 2
engines = 1
max_lag = 1
"""
SEED = 7
STEPS = 200
NUM_ROUNDS = 8
"""in each both engines and the reward worker are killed, if they have started"""
NUM_TRAINER_KILLS = 4
DRIVER_KILLED = (70, 130)
STALL_SECONDS = 300.0
"""so long without a step, or with processes that should have ended, is a hang"""


@pytest.fixture
def started_runs() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs that end with the test, however it ends."""
    runs: list[subprocess.Popen[bytes]] = []
    yield runs
    for run in runs:
        if run.poll() is None:
            run.terminate()
            run.wait(STALL_SECONDS)


def start(config: Path, log: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "trustbatch", "train", str(config)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=log.open("ab"),
    )


KINDS = {
    b"ray::EngineActor": "engines",
    b"ray::RewardActor": "graders",
    b"ray::TrainerActor": "trainers",
}


def processes_of(driver: int, *kinds: str) -> list[tuple[int, str]]:
    """Processes of a run that are of some kinds, each with its kind."""
    found = []
    for pid in sorted(descendants(driver)):
        command = command_line(pid)
        found += [(pid, kind) for name, kind in KINDS.items() if command.startswith(name)]
    return [(pid, kind) for pid, kind in found if kind in kinds]


def kill_workers(driver: int, chance: random.Random) -> Counter[str]:
    """Kill all engines and reward workers of a run, a moment apart; counts them by kind."""
    workers = processes_of(driver, "engines", "graders")
    for pid, _ in workers:
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
    return Counter(kind for _, kind in workers)


def wait_for_end(started: set[int]) -> None:
    """Wait until no process of a run is left."""
    deadline = time.monotonic() + STALL_SECONDS
    while any(command_line(pid).startswith((b"ray::", b"/")) for pid in started):
        assert time.monotonic() < deadline, "processes outlive the run that they belong to"
        time.sleep(0.1)


def assert_same_weights(run: Path, undisturbed: Path, steps: int) -> None:
    mine, others = (
        load_file(folder / "checkpoints" / f"step-{steps}" / "model.safetensors")
        for folder in (run, undisturbed)
    )
    assert all(torch.equal(mine[name], others[name]) for name in others)


@pytest.mark.long
def test_two_hundred_steps_among_kills_train_on_every_prompt_as_often_as_undisturbed(
    tiny_folder: Path,
    tmp_path: Path,
    started_runs: list[subprocess.Popen[bytes]],
    reliability: Record,
) -> None:
    for name in ("calm", "chaos"):
        text = CONFIG.format(model=str(tiny_folder), folder=str(tmp_path / name), steps=STEPS)
        text = text.replace("'", '"')
        more = text.replace("[rollout]", "[rollout]\nlag = 2") if name == "calm" else text + CLUSTER
        (tmp_path / f"{name}.toml").write_text(more)
    calm = start(tmp_path / "calm.toml", tmp_path / "log")
    started_runs.append(calm)
    run, log = tmp_path / "chaos" / "run", tmp_path / "log"
    chance, killed = random.Random(SEED), Counter[str]()
    rounds = sorted(chance.sample(range(5, STEPS - 5), NUM_ROUNDS))
    for ends_at in (*DRIVER_KILLED, STEPS + 1):
        driver = start(tmp_path / "chaos.toml", log)
        started_runs.append(driver)
        started: set[int] = set()
        last_step, deadline = -1, 0.0
        while driver.poll() is None and last_step < ends_at:
            step = len(read_metrics(run))
            if step != last_step:
                last_step, deadline = step, time.monotonic() + STALL_SECONDS
            assert time.monotonic() < deadline, f"the run hangs: {log.read_text()[-2000:]}"
            started |= descendants(driver.pid)
            if rounds and step >= rounds[0]:
                rounds.pop(0)
                killed += kill_workers(driver.pid, chance)
            time.sleep(0.05)
        if ends_at <= STEPS:
            driver.kill()
            killed["drivers"] += 1
        assert driver.wait() == (0 if ends_at > STEPS else -signal.SIGKILL), log.read_text()[-2000:]
        wait_for_end(started)
    assert calm.wait(STALL_SECONDS) == 0, log.read_text()[-2000:]
    assert killed.total() >= 22

    undisturbed = tmp_path / "calm" / "run"
    assert trained_on(run) == trained_on(undisturbed)
    assert len(trained_on(run)) == STEPS * 2
    assert_same_weights(run, undisturbed, STEPS)
    reliability.add("cluster", kills=killed.total(), **killed)


@pytest.mark.long
def test_a_run_whose_trainers_are_killed_goes_on_from_its_checkpoints(
    tiny_folder: Path,
    tmp_path: Path,
    started_runs: list[subprocess.Popen[bytes]],
    reliability: Record,
) -> None:
    log, steps = tmp_path / "log", 60
    chance = random.Random(SEED)
    moments = sorted(chance.sample(range(12, steps - 5), NUM_TRAINER_KILLS))
    for name in ("calm", "chaos"):
        text = CONFIG.format(model=str(tiny_folder), folder=str(tmp_path / name), steps=steps)
        (tmp_path / f"{name}.toml").write_text(text.replace("'", '"') + TRAINERS)
        run = tmp_path / name / "run"
        for ends_at in (*(moments if name == "chaos" else ()), steps + 1):
            driver = start(tmp_path / f"{name}.toml", log)
            started_runs.append(driver)
            started: set[int] = set()
            deadline = time.monotonic() + STALL_SECONDS
            while driver.poll() is None and len(read_metrics(run)) < ends_at:
                assert time.monotonic() < deadline, f"the run hangs: {log.read_text()[-2000:]}"
                started |= descendants(driver.pid)
                time.sleep(0.05)
            if ends_at <= steps:
                trainers = processes_of(driver.pid, "trainers")
                os.kill(chance.choice(trainers)[0], signal.SIGKILL)
                assert driver.wait(STALL_SECONDS) == 2
                assert "died" in log.read_text().splitlines()[-1]
            assert driver.wait(STALL_SECONDS) == (0 if ends_at > steps else 2)
            wait_for_end(started)
    assert trained_on(run) == trained_on(tmp_path / "calm" / "run")
    assert_same_weights(run, tmp_path / "calm" / "run", steps)
    reliability.add("cluster", kills=NUM_TRAINER_KILLS, trainers=NUM_TRAINER_KILLS)


def trained_on(run: Path) -> dict[str, list[int]]:
    """In which steps each prompt was trained on."""
    found: dict[str, list[int]] = {}
    for file in sorted((run / "rollouts").iterdir()):
        for row in read_rollouts(file):
            if row["sample"] == 0:
                found.setdefault(row["prompt_id"], []).append(row["step"])
    return found
