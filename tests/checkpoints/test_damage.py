"""A damaged checkpoint is skipped for an older one or refused; never are its weights used."""

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.damaged_checkpoints import list_damages
from tests.support.killed_runs import comparable
from tests.support.reliability import Record

from trustbatch.api import RunResult, train_config
from trustbatch.config import parse_config
from trustbatch.errors import CheckpointError, ConfigError

SEED = 5
STEPS, STOPPED_AFTER = 8, 6


def start(model: Path, folder: Path, *, steps: int = STEPS, seed: int = 0) -> RunResult:
    """Start a run of eight steps, or go on with it, and stop after so many steps."""
    tree: dict[str, Any] = {
        "seed": seed,
        "model": {"name": str(model)},
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 3, "lag": 1},
        "training": {"steps": STEPS, "learning_rate": 1e-3},
        "run": {"folder": str(folder), "checkpoint_every": 2, "keep_checkpoints": 3},
    }
    trained = iter(range(1, STEPS + 1))
    return train_config(parse_config(tree), is_asked_to_stop=lambda: next(trained) >= steps)


def assert_same(result: RunResult, reference: RunResult) -> None:
    """Metrics, weights and optimizer state are those of the undisturbed run."""
    assert comparable(result.folder) == comparable(reference.folder)
    for file in ("model.safetensors", "trainer/rank-00001-of-00001-part-00001.safetensors"):
        mine, others = load_file(result.checkpoint / file), load_file(reference.checkpoint / file)
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[name], others[name]) for name in others)


def is_sentence(message: str) -> bool:
    return "\n" not in message and message.endswith(".")


@pytest.mark.long
def test_no_damage_leads_to_other_weights(
    tiny_folder: Path,
    tmp_path: Path,
    reliability: Record,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reference = start(tiny_folder, tmp_path / "reference")
    stopped = start(tiny_folder, tmp_path / "stopped", steps=STOPPED_AFTER).folder
    other = start(tiny_folder, tmp_path / "other", steps=STOPPED_AFTER, seed=1).folder
    kept = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    assert kept == ["step-2", "step-4", "step-6"]
    outcomes: Counter[str] = Counter()
    damages = [*list_damages(stopped / "checkpoints", other / "checkpoints", seed=SEED)]
    for number, damage in enumerate(damages):
        folder = tmp_path / "damaged"
        shutil.copytree(stopped, folder / "run")
        damage.apply(folder / "run" / "checkpoints")
        capsys.readouterr()
        try:
            assert_same(start(tiny_folder, folder), reference)
            outcome = "skipped" if "Skipped" in capsys.readouterr().err else "harmless"
        except (CheckpointError, ConfigError) as error:
            outcome = "refused" if is_sentence(str(error)) else "wrong"
        except AssertionError:
            outcome = "wrong"
        outcomes[outcome] += 1
        with capsys.disabled():
            sys.stderr.write(f"{number + 1} of {len(damages)}: {damage.name}: {outcome}\n")
        shutil.rmtree(folder)
    assert not outcomes["wrong"]
    reliability.add("damage", checkpoints=len(damages), **outcomes)
