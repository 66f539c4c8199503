"""The environment in docs/environments.md works as it stands there."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from trustbatch.observe.run_folder import read_metrics
from trustbatch.tasks.base import Environment, grade_completion
from trustbatch.types import Role, Turn

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]


def test_the_example_plays_and_grades() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(CODE, PAGE, "exec"), names)
    task = names["RunningSum"]()
    assert isinstance(task, Environment)
    prompt = task.prompt(0)
    first, second, third = prompt.details["numbers"]
    turns = [Turn(role=Role.POLICY, text=str(first))]
    for number, said in ((second, first + second), (third, 0)):
        assert task.reply(prompt, turns) == f"+{number}="
        turns.append(Turn(role=Role.ENVIRONMENT, text=f"+{number}="))
        turns.append(Turn(role=Role.POLICY, text=str(said)))
    assert task.reply(prompt, turns) is None
    assert grade_completion(task, prompt, "0", turns) == pytest.approx(2 / 3)


def test_the_example_trains(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, tmp_path / "runs" / "quickstart" / "tiny-model-0")
    exec(compile(CODE, PAGE, "exec"), {"__name__": "__main__"})
    metrics = read_metrics(tmp_path / "runs" / "running-sum")
    assert len(metrics) == 20
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert metrics[-1]["episode/turns_max"] == 3.0
