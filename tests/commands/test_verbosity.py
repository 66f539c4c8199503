"""--quiet and --verbose: what a command says."""

from pathlib import Path

import pytest
from tests.support.small_config import write_config

from trustbatch.cli import main


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> str:
    return write_config(tmp_path, tiny_folder, steps=20)


def test_a_quiet_run_shows_its_warnings_and_its_last_line(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--training.steps", "1"]
    assert main(["train", config, *few, "--quiet", "--run.name", "a"]) == 0
    captured = capsys.readouterr()
    model = tmp_path / "runs" / "a" / "checkpoints" / "step-1"
    assert captured.out == f"Model   {model}\n"
    assert captured.err == ""
    hot = ["--objective.name", "grpo", "--rollout.temperature", "1.2", "--run.name", "b"]
    assert main(["-q", "train", config, *few, *hot]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rollout.temperature = 1.2")
    words = ["--prompts", "2", "--samples", "1", "--output", str(tmp_path / "e"), "-q"]
    assert main(["eval", str(tmp_path / "runs" / "a"), *words]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"Results  {tmp_path / 'e' / 'a-step-1-arithmetic'}\n"
    assert captured.err == ""
    # the next command of the same process is as talkative as ever
    assert main(["eval", str(tmp_path / "runs" / "a"), *words[:-1]]) == 0
    assert "| mean reward (95% interval) |" in capsys.readouterr().out


def test_a_verbose_run_shows_every_step(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--verbose", "--run.name", "a"]) == 0
    assert capsys.readouterr().err.count("reward") == 20
    assert main(["train", config, "--run.name", "b"]) == 0
    assert capsys.readouterr().err.count("reward") == 10


def test_a_traceback_is_shown_where_it_is_asked_for(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, is_shown in (([], False), (["-v"], True), (["-q"], False)):
        assert main(["train", config, "--model.device=gpu", *words]) == 2
        error = capsys.readouterr().err
        assert ("Traceback (most recent call last)" in error) is is_shown
        assert error.count("error: ") == 1


def test_both_at_once_are_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", config, "-q", "-v"])
    assert "not allowed with argument" in capsys.readouterr().err
