"""The command line as a user meets it: what works, and the sentence for what does not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.small_config import write_config

from trustbatch.cli import main


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> str:
    return write_config(tmp_path, tiny_folder, steps=2)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_train_leaves_a_model_and_a_report(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "--training.steps=3", "--run.name=a"]) == 0
    captured = capsys.readouterr()
    assert "step 3/3  reward" in captured.err
    assert "1-ESS" in captured.err
    assert "left" in captured.err
    run = tmp_path / "runs" / "a"
    assert (run / "report.html").is_file()
    assert (run / "checkpoints" / "step-3" / "model.safetensors").is_file()
    assert str(run / "report.html") in captured.out


def test_report_of_two_runs(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        assert main(["train", config, f"--run.name={name}"]) == 0
    runs = [str(tmp_path / "runs" / name) for name in "ab"]
    page = tmp_path / "both.html"
    assert main(["report", *runs, "--output", str(page)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    own = (tmp_path / "runs" / "a" / "report.html").read_bytes()
    capsys.readouterr()
    assert main(["report", *runs]) == 0
    together = tmp_path / "runs" / "report-a-b.html"
    assert capsys.readouterr().out.strip() == str(together)
    assert "<h1>2 runs</h1>" in together.read_text()
    assert (tmp_path / "runs" / "a" / "report.html").read_bytes() == own


def test_dry_run_prints_config_and_plan_and_trains_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "--dry-run", "--objective.reference_kl_coef=0.1"]) == 0
    out = capsys.readouterr().out
    assert 'kl = "top_k"' in out
    assert "2 prompts x 2 samples = 4 completions" in out
    assert "parameters" in out
    assert "reference" in out
    assert not (tmp_path / "runs").exists()


def test_a_clip_and_another_temperature_are_cautioned_against(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = ["train", config, "--objective.name=grpo", "--rollout.temperature=1.2"]
    assert main([*hot, "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("caution")]
    assert "what is wrong and unlikely (A < 0, r < 1 - clip_low)" in line
    assert "so entropy rises by itself" in line
    for cure in ("--training.policy_temperature=rollout", "--objective.name=p3o"):
        assert main([*hot, "--dry-run", cure]) == 0
        assert "caution" not in capsys.readouterr().out
    assert main([*hot, "--training.steps=1"]) == 0
    assert line.removeprefix("caution").strip() in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--task.name=arithmetik", "did you mean 'arithmetic'?"),
        ("--task.levl=2", "did you mean 'level'?"),
        ("--task.level=[1]", "task.level = [1] must be an integer"),
        ("--model.name=/no/such/folder", "is not a folder here"),
    ],
)
def test_dry_run_refuses_what_training_would(
    config: str, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    assert words in error_of(capsys, "train", config, "--dry-run", override)


def test_dry_run_imports_reward_functions(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text("def brevity(prompt, completion, answer):\n    return 1\n")
    for name in ("function", "batch_function"):
        term = f'--reward.terms=[{{name = "{name}", path = "{tmp_path}/rewards.py:brevty"}}]'
        assert "did you mean 'brevity'?" in error_of(capsys, "train", config, "--dry-run", term)
    assert main(["train", config, "--dry-run", term.replace("brevty", "brevity")]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_are_not_there(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "torch sees no GPU" in error_of(capsys, "train", config, "--model.device=cuda")
    assert "set it to cpu or cuda" in error_of(capsys, "train", config, "--model.device=gpu")


def test_a_folder_that_cannot_be_made(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, "train", config, f"--run.folder={config}")
    assert message.startswith("error: ")
    assert "Not a directory" in message


def test_unknown_key_gets_the_nearest_name(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "train", config, "--training.step=3")
    assert message == "error: Unknown key 'training.step': did you mean 'training.steps'?"


def test_missing_model(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "train", config, "--model.name=no/such-model")
    assert "model.name = 'no/such-model' could not be loaded" in message
    assert "give a local folder" in message


def test_folder_that_is_no_model(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, "train", config, f"--model.name={tmp_path}")
    assert "without config.json" in message


def edited_copy(tiny_folder: Path, folder: Path, **changes: Any) -> Path:
    """Copy the model and set keys of its tokenizer and generation configs; None removes one."""
    shutil.copytree(tiny_folder, folder)
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        content = json.loads((folder / name).read_text())
        for key, value in changes.items():
            if value is None:
                content.pop(key, None)
            elif key in content:
                content[key] = value
        (folder / name).write_text(json.dumps(content))
    return folder


def test_tokenizer_without_end_token(
    config: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited_copy(tiny_folder, tmp_path / "noeos", eos_token=None, eos_token_id=None)
    message = error_of(capsys, "train", config, f"--model.name={folder}")
    assert "has no end-of-sequence token" in message
    assert "set eos_token in its tokenizer_config.json" in message


def test_tokenizer_without_pad_token_trains_the_same(
    config: str, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = edited_copy(tiny_folder, tmp_path / "nopad", pad_token=None, pad_token_id=None)
    losses = []
    for name, model in (("pad", tiny_folder), ("nopad", folder)):
        assert main(["train", config, f"--model.name={model}", f"--run.name={name}"]) == 0
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["policy/loss"] for line in lines])
    assert losses[0] == losses[1]


def test_empty_data(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    text = Path(config).read_text().replace('name = "arithmetic"\nlevel = 1', "")
    Path(config).write_text(text.replace("[task]", f'[task]\nname = "file"\npath = "{empty}"'))
    assert "has no rows: give a file with problems" in error_of(capsys, "train", config)


def test_prompt_longer_than_the_context(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "train", config, "--rollout.max_tokens=126")
    assert "is more than the model's context of 128: lower max_tokens" in message


def test_max_tokens_below_one(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "train", config, "--rollout.max_tokens=0")
    assert message == ("error: rollout.max_tokens = 0: input should be greater than or equal to 1.")


def test_group_of_one(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "train", config, "--rollout.samples_per_prompt=1")
    assert "set it to 2 or more" in message


def test_checkpoint_of_another_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config]) == 0
    capsys.readouterr()
    message = error_of(capsys, "train", config, "--training.steps=1")
    assert "holds a run with another configuration (training.steps was 2, now 1)" in message
    assert "choose another name or folder for this run" in message


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian x", "There is no command 'trian' (did you mean 'train'?): choose one of init, "),
        ("report x --outptu y", "report has no option --outptu (did you mean '--output'?)"),
        ("report x --training.steps=3", "report has no option --training.steps: `trustbatch"),
        ("compare a b c", "compare takes no further word 'c': remove it."),
        ("train x --dryrun", "train has no option --dryrun (did you mean '--dry-run'?)"),
        ("train x y", "train takes no further word 'y': remove it."),
        ("train x --seed", "--seed has no value: write --seed=VALUE."),
        ("train x --training.steps", "--training.steps has no value: write --training.steps=VAL"),
        ("train x --training.steps --dry-run", "--training.steps has no value"),
        ("train x --training.betas [0.9, 0.95]", "--training.betas has only a part of a list"),
        ("train x --training.betas=[0.9, 0.95]", "put the whole of it in quotes, as in "),
        ("doctor x --rollout.n", "--rollout.n has no value"),
    ],
)
def test_a_word_that_is_not_understood(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert sentence in error_of(capsys, *words.split())


def test_keys_may_be_followed_by_their_values(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--rollout.temperature 1.5 --run.name=a --objective.name grpo --training.compile"
    words += " --training.share_prompts false --seed 7 --run.name b --advantage.epsilon 1e-3"
    lists = ["--training.betas", "[0.8, 0.9]", "--model.lora", "{rank = 4}"]
    # the file may come after a key that needs no value
    assert main(["train", *words.split(), *lists, "--training.compile", config, "--dry-run"]) == 0
    config_lines = capsys.readouterr().out.splitlines()
    for line in (
        "seed = 7",
        "temperature = 1.5",
        'name = "b"',
        'name = "grpo"',
        "compile = true",
        "share_prompts = false",
        "epsilon = 0.001",
        "    0.8,",
        "rank = 4",
    ):
        assert line in config_lines, line


def test_a_negative_number_is_a_value(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(capsys, "train", config, "--rollout.lag", "-1")
    assert message == "error: rollout.lag = -1: input should be greater than or equal to 0."


def test_importing_what_training_imports_prints_nothing() -> None:
    """torchao and bitsandbytes, which PEFT imports, warn about kernels that they can't load."""
    code = "import trustbatch, trustbatch.build.session, peft, peft.tuners.lora"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""


def test_an_error_can_not_control_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["report", str(tmp_path / "no\x1b[2J\x07such")]) == 2
    printed = capsys.readouterr().err
    assert "such" in printed
    assert "\x1b[2J" not in printed
    assert "\x07" not in printed
