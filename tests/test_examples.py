"""The files under examples/ and configs/ work."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
from tests.test_docs import code_blocks

from trustbatch.cli import main
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


def test_minimal_loop_shows_every_stage(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps on an untrained model: on-policy at first, but for the temperature."""
    module = runpy.run_path(str(ROOT / "examples" / "minimal_loop.py"))
    history = module["train"](tiny_folder, num_steps=3)
    assert capsys.readouterr().out.count("reward") == 3
    assert [line["rollout/version"] for line in history] == [0, 0, 2]
    for line in history:
        # fewer than MAX_TOKENS tokens where a completion has stopped
        assert 32 * 8 <= line["tokens/count"] <= 32 * 8 * module["MAX_TOKENS"]
        assert line["tokens/nonfinite"] == 0
        assert 0 < line["ess"] < 1
    assert history[1]["ratio/max"] > history[0]["ratio/max"]  # one version old


def test_minimal_loop_stays_small() -> None:
    text = (ROOT / "examples" / "minimal_loop.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda f: f.name)
def test_configs_are_valid(file: Path) -> None:
    assert load_config(file).objective.name == "p3o"


def test_the_task_of_the_page_on_tasks_trains(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a reader would do it: save the file, save the configuration, run; then from Python."""
    page = ROOT / "docs" / "tasks.md"
    task, from_python = code_blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = tmp_path / "runs" / "quickstart" / "tiny-model-0"
    shutil.copytree(tiny_folder, model)
    (tmp_path / "sort_digits.py").write_text(task)
    (tmp_path / "sort_digits.toml").write_text(code_blocks(page, "toml")[0])
    assert main(["train", "sort_digits.toml", "--dry-run"]) == 0
    assert "task        sort_digits: 400 problems" in capsys.readouterr().out
    assert main(["train", "sort_digits.toml"]) == 0
    rewards = [line["reward/mean"] for line in read_metrics(tmp_path / "runs" / "sort-digits")]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > sum(rewards[:5])
    exec(compile(from_python, page, "exec"), {})
    assert len(read_metrics(tmp_path / "runs" / "p3o-sort_digits")) == 2
