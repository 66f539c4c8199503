"""[cluster]: refused values, the version that samples a batch, and no Ray without the table."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import forked

import trustbatch
from trustbatch.api import train_config
from trustbatch.cli import main
from trustbatch.cluster import ray_runtime
from trustbatch.config import Config, parse_config
from trustbatch.errors import ConfigError


def config_with(cluster: dict[str, Any], **rollout: Any) -> Config:
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "rollout": rollout}
    return parse_config({**tree, "cluster": cluster})


@pytest.mark.parametrize(
    ("cluster", "rollout", "sentence"),
    [
        ({}, {"lag": 1}, r"rollout.lag is for runs without \[cluster\]: set cluster.max_lag"),
        ({"reuse": 3}, {}, "cluster.reuse = 3 trains .* set cluster.max_lag to 2 or more"),
        ({"max_lag": 0}, {"dynamic_sampling": True}, "set cluster.max_lag to 1 at least"),
        ({"transfer_folder": "x"}, {}, 'requires cluster.weight_transfer = "disk"'),
        ({"engins": 1}, {}, "did you mean 'cluster.engines'"),
    ],
)
def test_what_can_not_be_is_refused(
    cluster: dict[str, Any], rollout: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_with(cluster, **rollout)


@pytest.mark.parametrize(
    ("cluster", "dynamic", "versions"),
    [
        ({"max_lag": 0}, False, [0, 1, 2, 3]),
        ({"max_lag": 2}, False, [0, 0, 0, 1]),
        ({"max_lag": 1, "reuse": 2}, False, [0, 2, 4, 6]),
        ({"max_lag": 2, "reuse": 2}, False, [0, 1, 3, 5]),
        ({"max_lag": 2}, True, [0, 0, 1, 2]),
    ],
)
def test_a_batch_is_sampled_by_the_oldest_version_that_its_last_use_allows(
    cluster: dict[str, Any], dynamic: bool, versions: list[int]
) -> None:
    config = config_with(cluster, dynamic_sampling=dynamic)
    assert [config.version_for(batch) for batch in (1, 2, 3, 4)] == versions


def test_engines_with_copies_are_checked_at_every_version() -> None:
    assert config_with({}).updates_per_canary == 1
    assert config_with({}, canary_every=3).updates_per_canary == 3


def test_torchrun_and_a_missing_ray_get_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_runtime, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'trustbatch\[ray\]'"):
        train_config(config_with({}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"without torchrun, and set cluster\.trainers"):
        train_config(config_with({}))


@pytest.mark.parametrize(
    ("device", "trainers", "visible", "for_ray"),
    [
        ("auto", 1, None, "1,2"),
        ("cuda", 1, "4,5,6", "5,6"),
        ("cuda:1", 1, None, "0,2"),
        ("cuda:1", 1, "4,5,6", "4,6"),
        ("cuda", 2, "4,5,6", "4,5,6"),
    ],
)
def test_a_single_trainer_keeps_the_gpu_that_it_trains_on(
    device: str,
    trainers: int,
    visible: str | None,
    for_ray: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv(ray_runtime.VISIBLE_GPUS, raising=False)
    if visible is not None:
        monkeypatch.setenv(ray_runtime.VISIBLE_GPUS, visible)
    with ray_runtime.own_gpu_hidden(device, trainers=trainers):
        assert os.environ[ray_runtime.VISIBLE_GPUS] == for_ray
    assert os.environ.get(ray_runtime.VISIBLE_GPUS) == visible


def test_ray_is_imported_only_to_train_with_a_cluster(tiny_folder: Path, tmp_path: Path) -> None:
    """The plan and the doctor look at a configuration with [cluster] in their own process."""
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu"},
            "task": {"name": "arithmetic"},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 2},
            "run": {"folder": str(tmp_path / "cluster")},
            "cluster": {"trainers": 6, "engines": 2},
        }
    )
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    with forked.process(train_and_examine, tiny_folder, tmp_path, file) as process:
        _, errors = process.communicate()
    assert process.returncode == 0, errors


def train_and_examine(model: Path, folder: Path, file: Path) -> None:
    """Do what needs no Ray, in a process that has not imported it."""
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 2}
    trustbatch.train(
        model=model,
        task="arithmetic",
        training={"steps": 1},
        rollout=rollout,
        run={"folder": str(folder)},
    )
    assert main(["train", str(file), "--dry-run"]) == 0
    assert main(["doctor", str(file), "--tokens", "8"]) == 0
    assert "ray" not in sys.modules
