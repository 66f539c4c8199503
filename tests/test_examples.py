"""The files under examples/ and configs/ work."""

import runpy
import sys
from pathlib import Path

import pytest

from trustbatch.config import load_config
from trustbatch.observe.run_folder import read_metrics

ROOT = Path(__file__).parents[1]


def test_custom_task_trains(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["custom_task.py", str(tiny_folder)])
    runpy.run_path(str(ROOT / "examples" / "custom_task.py"), run_name="__main__")
    rewards = [line["reward/mean"] for line in read_metrics(tmp_path / "runs" / "reverse")]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) > sum(rewards[:5])


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda f: f.name)
def test_configs_are_valid(file: Path) -> None:
    assert load_config(file).objective.name == "p3o"
