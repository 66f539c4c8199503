"""Runs killed with SIGKILL again and again, at moments of all kinds, lose nothing."""

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.killed_runs import LEARNING, PHASES, Kind, WatchedRun, comparable, finish
from tests.support.reliability import Record

from trustbatch.checkpoints.load import newest_checkpoint

KINDS = {
    "synchronous": Kind(steps=60, every=1),
    "lag": Kind(steps=60, lag=3),
    "two anchors": Kind(steps=60, objective="two_anchor", every=3),
    "curriculum": Kind(steps=60, task=LEARNING, lag=1),
}
KILLS_PER_KIND = 35
SEED = 11
STALL_SECONDS = 300.0
"""so long without the moment of the next kill is a hang"""


def moments(seed: str) -> Iterator[tuple[str, int, float]]:
    """A phase, how often it has begun when the kill is due, and a share of its duration."""
    chance = random.Random(seed)
    while True:
        yield chance.choice(PHASES), chance.randint(1, 3), chance.uniform(0.0, 1.2)


def kill_at(run: WatchedRun, phase: str, count: int, delay: float) -> list[str] | None:
    """Kill a run at a moment; returns the phases it was in, or None if it ended before."""
    deadline = time.monotonic() + STALL_SECONDS
    count = 1 if phase == "start" else count
    while run.entered(phase) < count:
        if run.has_ended:
            return None
        assert time.monotonic() < deadline, f"the run never comes to its {phase}"
        time.sleep(0.0002)
    until = time.perf_counter() + delay
    while time.perf_counter() < until:
        time.sleep(0.0001)
    return None if run.has_ended else run.kill()


def assert_same_weights(checkpoint: Path, reference: Path) -> None:
    """Weights and optimizer state are those of the undisturbed run after the same step."""
    for file in ("model.safetensors", "trainer/rank-00001-of-00001-part-00001.safetensors"):
        mine, others = load_file(checkpoint / file), load_file(reference / file)
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[name], others[name]) for name in others), checkpoint


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_run_killed_again_and_again_equals_one_never_killed(
    tiny_folder: Path,
    tmp_path: Path,
    reliability: Record,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    kind = KINDS[name]
    undisturbed = kind.write(tmp_path / "whole", tiny_folder, keep=kind.steps)
    watched = WatchedRun(undisturbed)
    assert watched.join(STALL_SECONDS) == 0, (undisturbed.parent / "log").read_text()
    typical = watched.mean_seconds()
    config = kind.write(tmp_path / "killed", tiny_folder)
    run, reference = (each.parent / "runs" / "run" for each in (config, undisturbed))
    killed: Counter[str] = Counter()
    num_kills = 0
    for phase, count, share in moments(f"{SEED} {name}"):
        if num_kills == KILLS_PER_KIND:
            break
        phases = kill_at(WatchedRun(config), phase, count, share * typical[phase])
        assert phases is not None, "the run ended before it could be killed: give it more steps"
        num_kills += 1
        killed.update(phases or ["between"])
        newest = newest_checkpoint(run / "checkpoints")
        if newest is not None:
            assert_same_weights(newest, reference / "checkpoints" / newest.name)
        found = newest.name if newest else "nothing"
        with capsys.disabled():
            sys.stderr.write(f"{name}: kill {num_kills} in {phases}; {found} is left\n")
    finish(config)
    assert comparable(run) == comparable(reference)
    assert len(comparable(run)) == kind.steps
    last = f"checkpoints/step-{kind.steps}"
    assert_same_weights(run / last, reference / last)
    reliability.add("kills", kills=num_kills, **killed)
