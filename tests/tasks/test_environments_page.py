"""The environment in docs/environments.md works as it stands there."""

import re
import shutil
import string
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trustbatch.cli import main
from trustbatch.observe.run_folder import read_metrics
from trustbatch.tasks import build_task
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


def block(language: str, containing: str) -> str:
    """The block of the page that has some text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [code for code in blocks if containing in code]
    return found


def test_the_environment_with_a_state_trains_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line; the tiny model's tokenizer gets the characters of the page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dice.py").write_text(block("python", "class Dice"))
    (tmp_path / "dice.toml").write_text(
        block("toml", "dice.py:Dice").replace("sessions = 8", "sessions = 2")
        + "max_tokens = 40\nprompts_per_step = 2\nsamples_per_prompt = 2\n"
        + f'[model]\nname = "{letters(tmp_path)}"\ndevice = "cpu"\n'
        + '[training]\nsteps = 1\n[run]\nname = "dice"\n'
    )
    assert main(["train", "dice.toml", "--dry-run"]) == 0
    assert main(["train", "dice.toml"]) == 0
    (line,) = read_metrics(tmp_path / "runs" / "dice")
    assert line["reward/failed"] == line["reward/timed_out"] == 0
    assert line["episode/turns_mean"] >= 1


def letters(folder: Path) -> Path:
    """A tiny model that knows all characters of a keyboard."""
    from trustbatch.models.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([each for each in string.printable if each not in tokenizer.get_vocab()])
    model = build_model(tokenizer, seed=0)
    model.save_pretrained(folder / "letters")
    tokenizer.save_pretrained(folder / "letters")
    return folder / "letters"


def test_the_game_of_the_page_starts() -> None:
    table = tomllib.loads(block("toml", 'name = "gem"'))["task"]
    task: Any = build_task(table.pop("name"), seed=0, **table)
    with closing(task):
        assert "within 6 turns" in task.prompt(0).text


def test_the_tool_of_the_page_answers() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block("python", "class Powers"), PAGE, "exec"), names)
    task = names["Powers"]()
    prompt = task.prompt(0)
    assert prompt.chat["tools"][0]["function"]["name"] == "power"
    (call,) = re.findall(r"^    (<tool_call>.*)$", PAGE.read_text(), re.MULTILINE)
    turns = [Turn(role=Role.POLICY, text=call)]
    assert task.reply(prompt, turns) == [{"role": "tool", "content": "32"}]
    assert task.reply(prompt, [Turn(role=Role.POLICY, text="512")]) is None
    assert task.grade(prompt, "512") == 1.0
