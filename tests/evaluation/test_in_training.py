"""Evaluation during training: its metrics, and that training stays bitwise the same."""

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import forked

import trustbatch
from trustbatch.build.session import build_session
from trustbatch.cli import main
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.evaluation.results import read_results
from trustbatch.observe.report import write_report
from trustbatch.observe.report_data import read_run
from trustbatch.observe.run_folder import read_metrics

ROOT = Path(__file__).parent.parent.parent
EVALUATION = {
    "every": 2,
    "suite": ["arithmetic", "DATA"],
    "prompts": 9,
    "samples": 3,
    "max_tokens": 9,
}
CONFIG = """
[model]
name = "{model}"
device = "cpu"
[task]
name = "arithmetic"
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_tokens = 5
lag = 1
[training]
steps = 5
learning_rate = 1e-3
[run]
name = "run"
folder = "{folder}"
checkpoint_every = 2
[evaluation]
every = 2
suite = ["arithmetic"]
prompts = 9
samples = 3
max_tokens = 9
"""


def run(tiny_folder: Path, folder: Path, **tables: Any) -> trustbatch.RunResult:
    data = folder / "own sums.jsonl"
    folder.mkdir(exist_ok=True)
    data.write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "2+1=", "answer": "3"}\n')
    if "evaluation" in tables:
        suite = [str(data) if each == "DATA" else each for each in tables["evaluation"]["suite"]]
        tables["evaluation"] = {**tables["evaluation"], "suite": suite}
    return trustbatch.train(
        model=tiny_folder,
        task={"name": "arithmetic", "level": 1},
        **{
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 5, "lag": 1},
            "training": {"steps": 5, "learning_rate": 1e-3},
            "run": {"name": "run", "folder": str(folder), "checkpoint_every": 2},
            **tables,
        },
    )


def trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is measured of the training, times aside."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("eval/", "time/"))}
        for line in lines
        if line["step"] > 0
    ]


def evaluated(lines: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    rows = {
        line["step"]: {k: v for k, v in line.items() if k.startswith("eval/")} for line in lines
    }
    return {step: row for step, row in rows.items() if row}


def test_a_run_is_the_same_with_and_without_evaluation(tiny_folder: Path, tmp_path: Path) -> None:
    plain = run(tiny_folder, tmp_path / "plain")
    watched = run(tiny_folder, tmp_path / "watched", evaluation=EVALUATION)
    assert trained(watched.metrics) == trained(plain.metrics)
    weights = [load_file(each.checkpoint / "model.safetensors") for each in (plain, watched)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for file in sorted((plain.folder / "rollouts").iterdir()):
        assert file.read_bytes() == (watched.folder / "rollouts" / file.name).read_bytes()
    scores = evaluated(watched.metrics)
    assert list(scores) == [0, 2, 4, 5]
    for row in scores.values():
        for task in ("arithmetic", "own sums", "average"):
            assert row[f"eval/{task}/pass@1_low"] <= row[f"eval/{task}/pass@1"]
            assert row[f"eval/{task}/pass@1"] <= row[f"eval/{task}/pass@3"]
            assert 0 <= row[f"eval/{task}/truncated_fraction"] <= 1
    # another policy samples other samples
    assert len({json.dumps(row) for row in scores.values()}) > 1


def test_the_folders_of_evaluations_hold_what_the_metrics_say(
    tiny_folder: Path, tmp_path: Path
) -> None:
    result = run(tiny_folder, tmp_path, evaluation=EVALUATION)
    folders = sorted((result.folder / "evaluations").iterdir())
    assert [folder.name for folder in folders] == [f"step-{step:06d}" for step in (0, 2, 4, 5)]
    for folder, row in zip(folders, evaluated(result.metrics).values(), strict=True):
        results = read_results(folder)
        for scores in results.scores:
            assert row[f"eval/{scores.name}/pass@1"] == scores.pass_at_k[0].value
    page = write_report([result.folder], tmp_path / "report.html").read_text()
    for task in ("arithmetic", "own sums", "average"):
        assert f'data-metric="eval/{task}/pass@1"' in page
    assert read_run(result.folder, "run").steps_done == 5


def test_a_resumed_run_evaluates_what_is_missing(tiny_folder: Path, tmp_path: Path) -> None:
    whole = run(tiny_folder, tmp_path / "whole", evaluation=EVALUATION)
    result = run(tiny_folder, tmp_path / "again", evaluation=EVALUATION)
    shutil.rmtree(result.folder / "checkpoints" / "step-5")
    again = run(tiny_folder, tmp_path / "again", evaluation=EVALUATION)
    assert evaluated(again.metrics) == evaluated(whole.metrics)
    assert trained(again.metrics) == trained(whole.metrics)
    # from the start: the evaluation before the first step is there once
    shutil.rmtree(result.folder / "checkpoints")
    again = run(tiny_folder, tmp_path / "again", evaluation=EVALUATION)
    assert [line["step"] for line in again.metrics] == [0, 1, 2, 3, 4, 5]
    # how a run is watched may change on the way
    shutil.rmtree(result.folder / "checkpoints" / "step-5")
    every_step = {**EVALUATION, "every": 1}
    again = run(tiny_folder, tmp_path / "again", evaluation=every_step)
    assert list(evaluated(again.metrics)) == [0, 2, 4, 5]


@pytest.mark.slow
def test_two_ranks_evaluate_as_one(tiny_folder: Path, tmp_path: Path) -> None:
    configs = {name: tmp_path / f"{name}.toml" for name in ("one", "two")}
    for name, file in configs.items():
        file.write_text(CONFIG.format(model=tiny_folder, folder=tmp_path / name))
    assert main(["train", str(configs["one"])]) == 0
    written = forked.in_ranks(2, main, ["train", str(configs["two"])])
    assert written.count("evaluation at step 4  9/9 problems") == 1
    one, two = (evaluated(read_metrics(tmp_path / name / "run")) for name in configs)
    assert list(two) == [0, 2, 4, 5]
    # version 0 is the same everywhere; later ones differ by the rounding of another division
    assert two[0] == one[0]
    for step in (2, 4, 5):
        assert two[step] == pytest.approx(one[step], abs=0.2)


def test_second_policies_do_not_answer_for_the_trained_one(
    tiny_folder: Path, tmp_path: Path
) -> None:
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 5}
    mixed = {"policies": [{"model": str(tiny_folder), "name": "other", "share": 0.5}]}
    training = {"steps": 1, "learning_rate": 1e-3}
    rows = [
        evaluated(
            run(
                tiny_folder,
                tmp_path / name,
                rollout=rollout | more,
                training=training,
                evaluation=EVALUATION,
            ).metrics
        )[0]
        for name, more in (("plain", {}), ("mixed", mixed))
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"every": 5}, "evaluation.suite is empty"),
        ({"suite": ["arithmetic"]}, "evaluation.every is not set"),
        ({"every": 5, "suite": ["aritmetic"]}, "did you mean 'arithmetic'?"),
        ({"every": 5, "suite": [{"name": "arithmetic", "level": 9}]}, "task.level must be one of"),
        ({"every": 5, "suite": ["arithmetic"], "max_tokens": 123}, "lower evaluation.max_tokens"),
        ({"evry": 5}, "did you mean 'evaluation.every'?"),
    ],
)
def test_what_can_not_be_evaluated_is_refused_before_the_training(
    tiny_folder: Path, tmp_path: Path, table: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        run(tiny_folder, tmp_path, evaluation={"suite": [], **table})
    assert not (tmp_path / "run").exists()


def test_graders_have_the_limits_of_the_run_and_no_processes_between_evaluations(
    tiny_folder: Path, tmp_path: Path
) -> None:
    suite = [{"name": f"{ROOT / 'tests' / 'support' / 'own_task.py'}:Plain"}]
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu"},
            "task": {"name": "arithmetic"},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 4},
            "reward": {"workers": 1, "time_limit": 7, "ungraded": 0.0, "terms": [{"name": "math"}]},
            "evaluation": {"every": 1, "suite": suite, "prompts": 2, "samples": 2},
            "run": {"folder": str(tmp_path)},
        }
    )
    session = build_session(config)
    before = {process.pid for process in multiprocessing.active_children()}
    scores = session.evaluation.after_step(1)
    assert scores["eval/Plain/ungraded"] == 0
    assert {process.pid for process in multiprocessing.active_children()} == before
    (scorer,) = session.evaluation._scorers.values()
    assert (scorer.reward.workers, scorer.reward.time_limit) == (1, 7)
    assert scorer.reward.terms == ()
    assert scorer._pools == {}
    session.checkpointer.close()
    session.engine.close()
    session.run.close()


def test_a_run_without_evaluation_has_no_such_table() -> None:
    tree = {"model": {"name": "m"}, "task": {"name": "arithmetic"}}
    assert "evaluation" not in parse_config(tree).to_dict()
    suite = ["aime24", {"name": "arithmetic", "level": 1}]
    config = parse_config({**tree, "evaluation": {"every": 3, "suite": suite}})
    assert config.to_dict()["evaluation"]["suite"] == suite
    assert parse_config(config.to_dict()) == config
