"""`trustbatch init`: a configuration that works at once."""

import shutil
from pathlib import Path

import pytest

from trustbatch.cli import main
from trustbatch.config import load_config
from trustbatch.objectives import OBJECTIVES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which the quickstart has made its model."""
    shutil.copytree(tiny_folder, tmp_path / "runs/quickstart/tiny-model-0")
    monkeypatch.chdir(tmp_path)


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["init", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_written_file_trains_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    assert "Next     trustbatch train trustbatch.toml --dry-run" in capsys.readouterr().out
    assert main(["train", "trustbatch.toml", "--dry-run"]) == 0
    small = ["--training.steps", "1", "--rollout.prompts_per_step", "2"]
    assert main(["train", "trustbatch.toml", *small]) == 0
    assert Path("runs/trustbatch/checkpoints/step-1/model.safetensors").is_file()
    text = Path("trustbatch.toml").read_text()
    assert "--objective.name grpo --run.name trustbatch-grpo" in text
    # what is commented out can be switched on
    for line in ("temperature = 1.0", "micro_batch_tokens = 4096", 'trackers = ["tensorboard"]'):
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    Path("more.toml").write_text(text)
    assert load_config("more.toml").training.micro_batch_tokens == 4096


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_can_be_chosen(objective: str, tiny_folder: Path) -> None:
    words = ["--model", str(tiny_folder), "--objective", objective]
    assert main(["init", "mine.toml", *words]) == 0
    config = load_config("mine.toml")
    assert config.objective.name == objective
    assert config.model.name == str(tiny_folder)
    assert config.run.name == "mine"


def test_a_file_of_problems(tiny_folder: Path) -> None:
    Path("rows.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n' * 4)
    assert main(["init", "a.toml", "--model", str(tiny_folder), "--task", "rows.jsonl"]) == 0
    assert load_config("a.toml").task.options == {"path": "rows.jsonl"}
    assert main(["train", "a.toml", "--dry-run", "--rollout.max_tokens", "8"]) == 0


def test_nothing_is_overwritten_and_wrong_names_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.toml").write_text("mine")
    assert "a.toml exists already: name another file" in error_of(capsys, "a.toml")
    assert Path("a.toml").read_text() == "mine"
    assert "did you mean 'grpo'?" in error_of(capsys, "b.toml", "--objective", "grpoo")
    assert "did you mean 'gsm8k'?" in error_of(capsys, "b.toml", "--task", "gsm", "--model", "m")
    assert "--task gsm8k needs a --model" in error_of(capsys, "b.toml", "--task", "gsm8k")
    assert "has no folder to be written to" in error_of(capsys, "no/b.toml")
    assert not Path("b.toml").exists()


def test_a_missing_model_of_the_quickstart_says_what_makes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init"]) == 0
    shutil.rmtree("runs/quickstart/tiny-model-0")
    for name, words in (
        ("runs/quickstart/tiny-model-0", "--model-only` makes it"),
        ("other/deep/tiny-model-3", "--model-only --folder other/deep --seed 3` makes it"),
        ("other/deep/model", "is not a folder here: check the path."),
    ):
        capsys.readouterr()
        assert main(["train", "trustbatch.toml", "--model.name", name]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_the_model_alone_can_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    """Here it is there already, so that nothing is trained."""
    assert main(["quickstart", "--model-only"]) == 0
    assert capsys.readouterr().out == "Model   runs/quickstart/tiny-model-0\n"
    assert not Path("runs/quickstart/report.html").exists()
