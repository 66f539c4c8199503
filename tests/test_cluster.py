"""Runs on real Ray: generation beside training, which is the synchronous run bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trustbatch
from trustbatch.cluster.ray_runtime import joined_ray
from trustbatch.config import parse_config

pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As processes on a busy machine have it; engines take the number over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def ray_at_hand(one_thread: None) -> Iterator[None]:
    """One Ray for all tests, with room for the largest of them."""
    largest = {"engines": 4, "trainers": 2, "reward_workers": 2}
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "cluster": largest}
    with joined_ray(parse_config(tree)):
        yield


def run(tiny_folder: Path, folder: Path, **changes: Any) -> trustbatch.RunResult:
    tables: dict[str, Any] = {
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_tokens": 4,
            "temperature": 1.1,
            "prompts_per_call": 2,
        },
        "training": {"steps": 6, "learning_rate": 1e-3},
        "run": {"folder": str(folder), "checkpoint_every": 3, "rollouts_every": 1},
    }
    for key, value in changes.items():
        tables[key] = {**tables[key], **value} if key in tables else value
    return trustbatch.train(model=tiny_folder, **tables)


def comparable(result: trustbatch.RunResult) -> list[dict[str, Any]]:
    """All metrics but those that measure the clock, the cluster or its canary."""
    left_out = ("time/", "cluster/", "canary/")
    return [
        {key: value for key, value in line.items() if not key.startswith(left_out)}
        for line in result.metrics
    ]


def rollouts(result: trustbatch.RunResult) -> dict[str, str]:
    return {path.name: path.read_text() for path in (result.folder / "rollouts").iterdir()}


def assert_same(actual: trustbatch.RunResult, expected: trustbatch.RunResult) -> None:
    assert comparable(actual) == comparable(expected)
    assert rollouts(actual) == rollouts(expected)
    mine = load_file(actual.checkpoint / "model.safetensors")
    others = load_file(expected.checkpoint / "model.safetensors")
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize(
    ("lag", "cluster"),
    [
        (0, {"engines": 2}),
        (1, {"engines": 1, "reward_workers": 0}),
        (1, {"engines": 4, "reward_workers": 2}),
        (2, {"engines": 2, "weight_transfer": "disk"}),
    ],
    ids=["lag 0", "lag 1, 1 engine", "lag 1, 4 engines", "lag 2, by disk"],
)
def test_any_number_of_engines_trains_as_one_process_does(
    lag: int, cluster: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    expected = run(tiny_folder, tmp_path / "sync", rollout={"lag": lag})
    actual = run(tiny_folder, tmp_path / "async", cluster=cluster | {"max_lag": lag})
    assert_same(actual, expected)
    # with lag L, the first L batches come from version 0 and the others are L versions old
    assert [line["rollout/lag_max"] for line in actual.metrics] == [min(s, lag) for s in range(6)]
    assert all(line["cluster/engine_restarts"] == 0 for line in actual.metrics)
    assert not (actual.folder / "weights").exists()
