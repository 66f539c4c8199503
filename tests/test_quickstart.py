"""The quickstart as a user runs it, and what it and the minimal loop promise."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import trustbatch
from trustbatch.cli import main
from trustbatch.config import load_config
from trustbatch.models import tiny

LOOP = Path(__file__).parents[1] / "examples" / "minimal_loop.py"


@pytest.mark.long
def test_p3o_takes_the_tiny_model_from_below_04_to_above_08(tmp_path: Path) -> None:
    result = trustbatch.train(
        model=tiny.warm_start(tmp_path / "tiny"),
        task={"name": "arithmetic", "level": 2},
        objective="p3o",
        rollout={"max_tokens": 6},
        training={"steps": 60, "learning_rate": 3e-4},
        run={"folder": str(tmp_path)},
    )
    rewards = [line["reward/mean"] for line in result.metrics]
    assert rewards[0] < 0.4
    assert sum(rewards[-5:]) / 5 > 0.8
    # on-policy: the engine samples from the trainer's own parameters
    assert max(line["one_minus_ess"] for line in result.metrics) < 1e-9


@pytest.mark.slow
def test_minimal_loop_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["minimal_loop.py"])
    runpy.run_path(str(LOOP), run_name="__main__")
    found = re.findall(r"^step +\d+  reward ([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    rewards = [float(reward) for reward in found]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2


@pytest.mark.slow
def test_quickstart_compares_and_reports(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # an untrained model in the place of the warm start: what is learned is tested above
    (tmp_path / "tiny-model-0").symlink_to(tiny_folder)
    assert main(["quickstart", "--folder", str(tmp_path), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    for word in ("on-policy", "mismatched", "p3o", "grpo-0.2", "grpo-0.4", "grpo-0.6", "report"):
        assert word in out
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["rows"]) == 8
    page = (tmp_path / "report.html").read_text()
    assert all(row["run"] in page for row in results["rows"])
    opening = page[page.index("<main>") : page.index('<section id="summary">')]
    assert re.search(r"<h2>Reward after 2 steps from 0\.\d{3}</h2>", opening)
    for row in results["rows"]:
        accuracy = f"{row['final']['mean_reward']:.3f} +- {row['final']['standard_error']:.3f}"
        assert f'<td>{row["objective"]}</td><td class="number">{accuracy}</td>' in opening
        assert accuracy in out
    stale = load_config(tmp_path / "mismatched-p3o-seed0" / "config.toml")
    assert (stale.rollout.temperature, stale.rollout.lag) == (1.2, 4)
