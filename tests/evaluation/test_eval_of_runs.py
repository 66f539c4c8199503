"""`trustbatch eval RUN`: a run is evaluated on its own task, or on its held-out problems."""

import json
from pathlib import Path
from typing import Any

import pytest

from trustbatch.cli import main
from trustbatch.evaluation.report import results_table
from trustbatch.evaluation.results import EvaluationResults, ProblemOutcome, score_tasks

CONFIG = """
[model]
name = {model!r}
[task]
{task}
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
max_tokens = 5
[training]
steps = 1
[run]
folder = {folder!r}
{more}
"""
FEW = ["--samples", "2"]


def train(tiny_folder: Path, folder: Path, name: str, task: str, more: str = "") -> Path:
    file = folder / f"{name}.toml"
    file.write_text(CONFIG.format(model=str(tiny_folder), task=task, folder=str(folder), more=more))
    assert main(["train", str(file), "--run.name", name]) == 0
    return folder / name


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on sums of one digit, on a file with a template, and on it with held-out rows."""
    folder = tmp_path_factory.mktemp("runs")
    for name, first in (("rows", 10), ("held_out", 20)):
        problems = [{"problem": str(first + i), "answer": "1"} for i in range(4)]
        text = "".join(json.dumps(each) + "\n" for each in problems)
        (folder / f"{name}.jsonl").write_text(text)
    rows = f'name = "file"\npath = "{folder}/rows.jsonl"\ntemplate = "{{problem}}+1="'
    suite = f'[evaluation]\nevery = 1\nsuite = ["{folder}/held_out.jsonl"]\nlimit = 3\nsamples = 1'
    return {
        "sums": train(tiny_folder, folder, "sums", 'name = "arithmetic"\nlevel = 1'),
        "rows": train(tiny_folder, folder, "rows", rows),
        "suite": train(tiny_folder, folder, "suite", rows, suite),
    }


def evaluated(output: Path, name: str, *words: object) -> tuple[dict[str, Any], list[str]]:
    """The settings of an evaluation, and its prompts."""
    assert main(["eval", *map(str, words), *FEW, "--output", str(output)]) == 0
    settings = json.loads((output / name / "settings.json").read_text())
    lines = (output / name / "samples.jsonl").read_text().splitlines()
    return settings, [json.loads(line)["prompt"] for line in lines]


def test_a_run_is_evaluated_on_its_own_task(runs: dict[str, Path], tmp_path: Path) -> None:
    words = [runs["sums"], "--prompts", "4"]
    settings, prompts = evaluated(tmp_path, "sums-step-1-arithmetic", *words)
    assert settings["max_tokens"] == 5
    # one digit each, as in training, where the default has two
    assert all(len(prompt) == 4 for prompt in prompts)
    assert len(prompts) == 4
    checkpoint = runs["sums"] / "checkpoints" / "step-1"
    words = [checkpoint, "--task.level", "3", "--prompts=2", "--max-tokens", "7"]
    settings, prompts = evaluated(tmp_path / "b", "sums-step-1-arithmetic", *words)
    assert settings["max_tokens"] == 7
    assert all(len(prompt) == 8 for prompt in prompts)


def test_a_file_comes_with_its_template_and_a_warning(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, prompts = evaluated(tmp_path, "rows-step-1-rows", runs["rows"])
    assert prompts == ["10+1=", "11+1=", "12+1=", "13+1="]
    warning = "These are the problems that the run was trained on"
    assert warning in capsys.readouterr().err
    words = [runs["rows"], "--task.template={problem}=", "--limit", "1"]
    assert evaluated(tmp_path / "b", "rows-step-1-rows", *words)[1] == ["10="]
    words[1:2] = ["--template", "{problem}-"]
    assert evaluated(tmp_path / "c", "rows-step-1-rows", *words)[1] == ["10-"]
    capsys.readouterr()
    held_out = runs["rows"].parent / "held_out.jsonl"
    evaluated(tmp_path / "d", "rows-step-1-held_out", runs["rows"], "--task", held_out)
    assert warning not in capsys.readouterr().err


def test_held_out_rows_where_the_run_has_some(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, prompts = evaluated(tmp_path, "suite-step-1-held_out", runs["suite"])
    assert prompts == ["20", "21", "22"]  # its limit is 3
    assert "trained on" not in capsys.readouterr().err
    words = [runs["suite"], "--task.deduplicate", "false", "--limit", "1"]
    assert evaluated(tmp_path, "suite-step-1-rows", *words)[1] == ["10+1="]


def test_two_runs_need_a_task_in_common(
    runs: dict[str, Path],
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = [str(runs["sums"]), str(runs["rows"])]
    assert main(["eval", *both]) == 2
    assert "different tasks: name one for all of them" in capsys.readouterr().err.replace("\n", " ")
    # the model that a run started from has no task of its own
    words = [tiny_folder, runs["sums"], "--prompts", "2"]
    assert len(evaluated(tmp_path, "tiny-arithmetic", *words)[1]) == 2


def outcome(reward: float | None, number: int) -> ProblemOutcome:
    graded = 0 if reward is None else 2
    return ProblemOutcome(
        id=str(number),
        samples=2,
        graded=graded,
        correct=0,
        truncated=0,
        mean_reward=reward,
        mean_tokens=1.0,
    )


def test_the_mean_reward_has_an_interval_in_the_units_of_the_rewards() -> None:
    rewards = [-2.0, 0.0, 1.0, 3.0, 3.0, 1.0, None]
    outcomes = {"graded": [outcome(reward, n) for n, reward in enumerate(rewards)]}
    (scores,) = score_tasks(outcomes)
    assert scores.mean_reward == 1.0
    low, high = scores.mean_reward_low, scores.mean_reward_high
    assert low is not None
    assert high is not None
    # 1.96 standard errors of six rewards are 1.54: sqrt(18 / 5) / sqrt(6) = 0.775
    assert -1.2 < low < 0.0 < 2.0 < high < 3.0
    results = EvaluationResults(
        model="m",
        settings={
            "samples": 2,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 4,
            "seed": 0,
            "engine": "native",
            "precision": "float32",
        },
        outcomes=outcomes,
    )
    assert f"| 1.000 ({low:.3f} to {high:.3f}) | 0.000 (0.000 to" in results_table(results)


def test_without_a_grade_there_is_no_mean_reward() -> None:
    (scores,) = score_tasks({"none": [outcome(None, 0)]})
    assert (scores.mean_reward, scores.mean_reward_low, scores.mean_reward_high) == (None,) * 3


def test_equal_rewards_do_not_make_it_certain() -> None:
    (scores,) = score_tasks({"all": [outcome(1.0, n) for n in range(20)]})
    assert scores.mean_reward == scores.mean_reward_high == 1.0
    assert scores.mean_reward_low is not None
    assert 0.7 < scores.mean_reward_low < 0.95
