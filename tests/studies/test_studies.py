"""Studies: the paper's tables, arms that differ in what is compared only, and runs that go on."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trustbatch.api import train_config
from trustbatch.checkpoints.load import newest_checkpoint
from trustbatch.cli import main
from trustbatch.config import Config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.models.loading import count_parameters
from trustbatch.observe.run_folder import read_metrics
from trustbatch.studies import execute as execute_module
from trustbatch.studies.benchmarks import BASE_MODEL, benchmark_jobs, benchmarks
from trustbatch.studies.command import add_study_arguments, requested_pace, requested_study
from trustbatch.studies.definitions import DEFINITIONS
from trustbatch.studies.folder import StudyFolder, write_failure
from trustbatch.studies.jobs import Job, run_tree, training_jobs
from trustbatch.studies.runner import Pace, run_jobs
from trustbatch.studies.scales import (
    cpu_scale,
    gpu_scale,
    paper_scale,
    small_paper_scale,
    smoke_scale,
)
from trustbatch.studies.study import Arm, Scale, Study
from trustbatch.studies.worker import Worker

SCALES = {
    "smoke": smoke_scale(),
    "cpu": cpu_scale(),
    "gpu": gpu_scale(),
    "paper": paper_scale(),
    "paper-1.5b": small_paper_scale(),
}


def config_of(study: Study, arm: Arm, seed: int = 0) -> Config:
    return parse_config(run_tree(study, arm, seed, out=Path("out"), models=Path("models")))


def configs_at_paper_scale(name: str, scale: str = "paper") -> list[Config]:
    study = DEFINITIONS[name](SCALES[scale])
    return [config_of(study, arm) for arm in study.arms]


# tab:optimizer_params, "Shared optimizer settings used across all experiments"
OPTIMIZER = {
    "Optimizer": ("AdamW", lambda c: {"adamw": "AdamW"}[c.training.optimizer]),
    "Learning rate": (1e-5, lambda c: c.training.learning_rate),
    "Betas": ((0.9, 0.95), lambda c: c.training.betas),
    "Weight decay": (0.01, lambda c: c.training.weight_decay),
    "Gradient clipping": (1.0, lambda c: c.training.gradient_clip),
    "LR scheduler": (
        ("WarmupCosineLR", 0.1),
        lambda c: (
            {"cosine": "WarmupCosineLR"}[c.training.schedule],
            c.training.warmup_fraction,
        ),
    ),
}


@pytest.mark.parametrize("row", OPTIMIZER)
@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("scale", ["paper", "paper-1.5b"])
def test_the_optimizer_is_that_of_the_paper(scale: str, name: str, row: str) -> None:
    value, read = OPTIMIZER[row]
    assert {read(config) for config in configs_at_paper_scale(name, scale)} == {value}


# tab:training_params, "Per-experiment training configuration": clip, temperature, FP8
COLUMNS = ("clip", "temperature", "fp8")
TRAINING: dict[str, tuple[Any, Any, Any]] = {
    "Model": ("Qwen3-4B-Thinking-2507", "Qwen3-4B-Thinking-2507", "Qwen3-8B-Base"),
    "Training / rollout GPU split": ((6, 2), (6, 2), (5, 3)),
    "Global train batch size": (48, 48, 5),
    "Train micro-batch / GPU": (8, 4, 1),
    "Gradient accumulation": (1, 2, 1),
    "Rollout batch size / GPU": (64, 64, 16),
    "Rollout samples / epoch": (512, 512, 256),
    "Max tokens": (1024, 4096, 16384),
    "Sampling temperature": ({1.0}, {0.6, 1.2}, {1.0}),
    "GRPO clip setting": ({0.2, 0.4, 0.6}, {0.4}, {0.4}),
}


def row(name: str, column: str) -> Any:
    return TRAINING[name][COLUMNS.index(column)]


@pytest.mark.parametrize("scale", ["paper", "paper-1.5b"])
@pytest.mark.parametrize("column", COLUMNS)
def test_every_row_of_the_training_table_is_in_the_configuration(column: str, scale: str) -> None:
    configs = configs_at_paper_scale(column, scale)
    # fig:clipping_factor_variability (b), fig:fp8_training (b), fig:temp_variability_appendix: a
    # model that no table has, so all rows but the first are those of the experiment
    model = row("Model", column) if scale == "paper" else "Qwen2.5-1.5B"
    for config in configs:
        rollout, training, cluster = config.rollout, config.training, config.cluster
        assert cluster is not None
        assert config.model.name == f"Qwen/{model}"
        assert (cluster.trainers, cluster.engines) == row("Training / rollout GPU split", column)
        assert cluster.max_lag == 0
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        assert samples == row("Rollout samples / epoch", column)
        assert rollout.prompts_per_call == row("Rollout batch size / GPU", column)
        assert rollout.max_tokens == row("Max tokens", column)
        # the fewest optimizer steps of which none has more than the global train batch
        train_batch = row("Global train batch size", column)
        assert training.passes == 1
        assert samples / training.mini_batches <= train_batch
        assert samples / (training.mini_batches - 1) > train_batch
        # the table's own arithmetic: GPUs x micro-batch x accumulation is the global batch
        micro_batch = row("Train micro-batch / GPU", column)
        accumulation = row("Gradient accumulation", column)
        assert cluster.trainers * micro_batch * accumulation == train_batch
        assert training.micro_batch_tokens == micro_batch * rollout.max_tokens
    temperatures = {config.rollout.temperature for config in configs}
    assert temperatures == row("Sampling temperature", column)
    grpo = [config.objective.options for config in configs if config.objective.name == "grpo"]
    assert {options["clip_low"] for options in grpo} == row("GRPO clip setting", column)
    assert {options["clip_high"] for options in grpo} == row("GRPO clip setting", column)
    is_fp8 = column == "fp8"
    assert {config.rollout.precision == "fp8" for config in configs} == {is_fp8}


def test_thinking_is_chosen_for_the_model_that_thinks() -> None:
    for name in DEFINITIONS:
        for config in configs_at_paper_scale(name):
            thinks = config.model.name == "Qwen/Qwen3-4B-Thinking-2507"
            assert config.task.options.get("thinking") is (False if thinks else None)
            assert ("thinking = false" in config.to_toml()) == thinks
        for config in configs_at_paper_scale(name, "paper-1.5b"):
            assert config.task.options.get("thinking") is None


def test_the_two_paper_scales_differ_in_the_model_alone() -> None:
    for name in DEFINITIONS:
        pairs = zip(
            configs_at_paper_scale(name), configs_at_paper_scale(name, "paper-1.5b"), strict=True
        )
        for large, small in pairs:
            one, other = _flat(large.to_dict()), _flat(small.to_dict())
            different = {key for key in one | other if one.get(key) != other.get(key)}
            assert different <= {"model.name", "task.thinking", "rollout.policies"}
            assert "model.name" in different
            assert [policy.share for policy in large.rollout.policies] == [
                policy.share for policy in small.rollout.policies
            ]


def test_benchmarks_and_hardware_are_those_of_the_paper() -> None:
    # tab:evaluation_params, "Benchmark-evaluation settings", and its 4K family
    suite = SCALES["paper"].suite
    assert (suite.temperature, suite.top_p, suite.samples, suite.max_tokens) == (
        1.0,
        0.95,
        16,
        4096,
    )
    assert [task["name"] for task in suite.tasks] == [
        "aime24",
        "aime25",
        "aime26",
        "amo_bench",
        "amc23",
    ]
    for name in DEFINITIONS:
        for config in configs_at_paper_scale(name):
            # tab:hardware_config, "Compute layout for the reported runs"
            assert config.cluster is not None
            assert config.cluster.trainers + config.cluster.engines == 8
            assert config.rollout.vllm.tensor_parallel == 1
            assert config.model.precision == "bfloat16"
            assert config.task.name == "deepscaler"


@pytest.mark.parametrize(("name", "max_tokens"), [("clip", 4096), ("fp8", 16384)])
def test_benchmarks_have_the_tokens_of_their_family(
    name: str, max_tokens: int, tmp_path: Path
) -> None:
    # tab:evaluation_params: "4K benchmark eval family (clip + temperature)", "16K ... (FP8)"
    trained = DEFINITIONS[name](SCALES["paper"])
    StudyFolder(tmp_path).write(trained, about={}, state="finished")
    study = benchmarks(SCALES["paper"], tmp_path)
    jobs = benchmark_jobs(
        study, SCALES["paper"], source=tmp_path, out=tmp_path, models=tmp_path, data=None
    )
    assert {job.details["suite"]["max_tokens"] for job in jobs} == {max_tokens}
    num_kept = 2 if name == "fp8" else 1  # tab:benchmark_results: iterations 15 and 30
    assert [job.details["is_checkpoint"] for job in jobs] == [False] + [True] * (
        num_kept * len(trained.arms)
    )


def test_benchmarks_of_fp8_are_those_of_the_paper_s_figure(tmp_path: Path) -> None:
    # fig:pass_at_k_fp8_avg and its columns
    StudyFolder(tmp_path).write(DEFINITIONS["fp8"](SCALES["paper"]), about={}, state="finished")
    study = benchmarks(SCALES["paper"], tmp_path)
    assert study.paper_columns == {
        "baseline_16k": "base",
        "fp8_p3o_iter15": "p3o-iter15",
        "fp8_p3o_iter30": "p3o",
        "fp8_grpo_iter15": "grpo-0.4-iter15",
        "fp8_grpo_iter30": "grpo-0.4",
    }
    assert set(study.paper_columns.values()) == {arm.plain_name for arm in study.arms}
    jobs = benchmark_jobs(
        study, SCALES["paper"], source=tmp_path, out=tmp_path, models=tmp_path, data=None
    )
    models = {job.name: job.details["model"] for job in jobs}
    checkpoints = tmp_path / "runs" / "fp8-p3o--seed-0" / "checkpoints"
    assert models["fp8-p3o-iter15--seed-0"] == str(checkpoints / "step-15")
    assert models["fp8-p3o--seed-0"] == str(checkpoints / "step-30")
    labels = [arm.label for arm in study.arms]
    assert labels[:3] == ["Base model", "Step 15: P3O, FP8 rollouts", "P3O, FP8 rollouts"]


def test_held_out_answers_may_be_as_long_as_rollouts(tmp_path: Path) -> None:
    for name, scale in (("fp8", SCALES["gpu"]), ("clip", SCALES["gpu"]), ("clip", SCALES["cpu"])):
        study = DEFINITIONS[name](scale)
        jobs = training_jobs(study, out=tmp_path, models=tmp_path, held_out=scale.held_out)
        asked = {job.details["held_out"]["max_tokens"] for job in jobs if job.kind == "train"}
        assert asked == {study.base["rollout"]["max_tokens"]}


def test_the_appendix_says_how_async_mixing_and_two_anchor_were_run() -> None:
    # fig:async_training, "under one optimizer step per rollout epoch"
    lags = {(c.cluster.max_lag, c.training.mini_batches) for c in configs_at_paper_scale("async")}  # type: ignore[union-attr]
    assert lags == {(1, 1), (2, 1)}
    # fig:policy_mixing_training
    for config in configs_at_paper_scale("mixing"):
        (other,) = config.rollout.policies
        assert (other.model, other.share, config.rollout.max_tokens) == ("Qwen/Qwen3-8B", 0.5, 4096)
    # fig:two_anchor_reward and fig:two_anchor_reward2
    found = {
        (c.rollout.temperature, c.objective.name, c.objective.options.get("clip_high"))
        for c in configs_at_paper_scale("two_anchor")
    }
    assert found == {
        (1.2, "two_anchor", None),
        (1.2, "p3o", None),
        (1.2, "grpo", 0.2),
        (1.0, "two_anchor", None),
        (1.0, "p3o", None),
        (1.0, "grpo", 0.4),
    }
    assert {c.rollout.max_tokens for c in configs_at_paper_scale("two_anchor")} == {4096}


def test_known_models_have_the_parameters_that_their_names_say() -> None:
    # published sizes: 4.0B and 8.2B (Qwen3), 0.49B and 1.54B (Qwen2.5)
    sizes = {
        "Qwen/Qwen3-4B-Thinking-2507": 4.02e9,
        "Qwen/Qwen3-8B-Base": 8.19e9,
        "Qwen/Qwen2.5-1.5B": 1.54e9,
        "Qwen/Qwen2.5-Coder-0.5B-Instruct": 0.494e9,
    }
    for name, size in sizes.items():
        assert count_parameters(name)[0] == pytest.approx(size, rel=0.005)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("name", DEFINITIONS)
def test_arms_differ_in_what_is_compared_and_in_nothing_else(name: str, scale: Scale) -> None:
    study = DEFINITIONS[name](scale)
    names = [arm.name for arm in study.arms]
    assert len(set(names)) == len(names)
    plain = {arm.name.removeprefix(f"{arm.regime}-") for arm in study.arms}
    assert study.subject in plain
    resolved = [_flat(config_of(study, arm).to_dict()) for arm in study.arms]
    # what an arm changes, and what a changed objective asks of the engine
    compared = {key for arm in study.arms for key in arm.changes} | {"objective", "run.name"}
    compared |= {"rollout.top_logprobs"}
    shared = [
        {key: value for key, value in flat.items() if not _is_among(key, compared)}
        for flat in resolved
    ]
    assert all(each == shared[0] for each in shared)
    assert {"training.learning_rate", "training.mini_batches"} <= shared[0].keys()
    # of all studies one gives runs more steps: those that lag, with every objective alike
    assert ("training.steps" in shared[0]) == (name != "evidence")
    by_regime = {(arm.regime, arm.changes.get("training.steps")) for arm in study.arms}
    assert len(by_regime) == len({arm.regime for arm in study.arms})
    # no two arms are the same run
    different = [json.dumps(flat | {"run.name": ""}, sort_keys=True) for flat in resolved]
    assert len(set(different)) == len(different)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def _is_among(key: str, compared: set[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in compared)


@pytest.mark.parametrize(
    ("scale", "model", "other"),
    [
        ("smoke", "tiny-model-3", "tiny-model-4"),
        ("cpu", "derail-model-0", "derail-model-1"),
    ],
)
def test_small_models_are_made_for_each_seed_and_larger_ones_for_all(
    scale: str, model: str, other: str
) -> None:
    study = DEFINITIONS["mixing"](SCALES[scale])
    config = config_of(study, study.arms[0], seed=3)
    assert config.model.name == f"models/{model}"
    assert config.rollout.policies[0].model == f"models/{other}"
    jobs = training_jobs(study, out=Path("out"), models=Path("models"), held_out=None)
    made = [job.name for job in jobs if job.kind == "make_model"]
    assert len(made) == (2 if scale == "cpu" else len(study.seeds) + 1)
    assert {model, other} <= set(made)


def test_no_regime_is_older_than_the_run() -> None:
    for scale in SCALES.values():
        study = DEFINITIONS["stress"](scale)
        regimes = {arm.regime for arm in study.arms}
        assert {"fresh", "lag8", "t0.6", "t1.2", "top-p0.95", "t1.2-lag4"} <= regimes
        for arm in study.arms:
            config = config_of(study, arm)
            lag = config.rollout.lag if config.cluster is None else config.cluster.max_lag
            assert lag < config.training.steps


def test_a_dry_run_of_the_paper_needs_neither_hub_nor_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["study", "mixing", "--scale", "paper", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "4,022,468,096 parameters" in shown
    assert "8,190,735,360 parameters" in shown
    assert "6 trainers with 1 CPU and 1 GPU each" in shown
    assert "2 engines with 1 CPU and 1 GPU each" in shown
    assert "in total 8 of Ray's 8 GPUs" in shown
    assert " fits: needs" in shown


def test_a_dry_run_of_the_smaller_model_has_a_folder_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["study", "fp8", "--scale", "paper-1.5b", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "1,543,714,304 parameters" in shown
    assert "runs/studies/fp8-paper-1.5b" in "".join(shown.split())
    assert " fits: needs" in shown


def test_a_dry_run_of_benchmarks_shows_the_suite_and_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StudyFolder(tmp_path).write(DEFINITIONS["fp8"](SCALES["paper"]), about={}, state="finished")
    words = ["study", "benchmarks", "--scale", "paper", "--from", str(tmp_path), "--dry-run"]
    assert main([*words, "--arms", "fp8-p3o"]) == 0
    shown = capsys.readouterr().out
    assert "1 arms x seeds 0 = 1 evaluations" in shown
    assert "aime24" in shown
    assert "16 of each problem at temperature 1, top-p 0.95, at most 16384 tokens" in shown
    assert "optimizer steps" not in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["clop"], "did you mean 'clip'"),
        (["clip", "--arms", "p3,grpo-0.2"], "did you mean 'p3o'"),
        (["clip", "--seeds", "a"], "--seeds a"),
        (["clip", "--set", "objective.name=grpo"], "is what the study compares"),
        (["benchmarks"], "--from"),
        (["benchmarks", "--from", "nowhere"], "study.json"),
    ],
)
def test_what_cannot_be_studied_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *words, "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    return parser.parse_args(words)


def requested(words: list[str]) -> tuple[Study, Scale]:
    return requested_study(options(words))


def numbers(run: Path) -> list[dict[str, float]]:
    """Metrics without what depends on the clock."""
    return [
        {key: value for key, value in line.items() if not key.startswith("time/")}
        for line in read_metrics(run)
    ]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Workers of the smoke scale have one: sums depend on it in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(tiny_folder: Path, out: Path) -> list[str]:
    settings = ["run.checkpoint_every=2", "rollout.prompts_per_step=8", "training.mini_batches=2"]
    return [
        *("clip", "--scale", "smoke", "--arms", "p3o,grpo-0.2", "--seeds", "1", "--steps", "8"),
        *("--model", str(tiny_folder), "--out", str(out)),
        *(word for setting in settings for word in ("--set", setting)),
    ]


@pytest.mark.long
def test_a_killed_study_goes_on_and_a_failed_arm_is_shown(
    tiny_folder: Path, tmp_path: Path, one_thread: None
) -> None:
    out = tmp_path / "study"
    words = small(tiny_folder, out)
    process = subprocess.Popen([sys.executable, "-m", "trustbatch", "study", *words])
    first = out / "runs" / "p3o--seed-0"
    deadline = time.monotonic() + 120
    while len(read_metrics(first)) < 3:
        assert process.poll() is None, "the study ended by itself"
        assert time.monotonic() < deadline, "no third step within two minutes"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(read_metrics(first)) < 8 or not (out / "runs/grpo-0.2--seed-0").exists()

    study, scale = requested(words)
    dying = f"{Path(__file__).parents[1] / 'support' / 'studies_dying_task.py'}:Dying"
    broken = (
        Arm(name="no-model", label="no model", changes={"model.name": str(tmp_path / "nowhere")}),
        Arm(name="dying", label="dying", changes={"task": {"name": dying}}),
    )
    study = replace(study, arms=(*broken, *study.arms))
    jobs = training_jobs(study, out=out, models=tmp_path, held_out=scale.held_out)
    lock = StudyFolder(out).lock  # the workers of the killed study have to end first
    tally = run_jobs(jobs, pace=Pace(threads=1), logs=out / "logs", lock=lock())
    assert (tally.done, sorted(tally.failed)) == (2, ["dying--seed-0", "no-model--seed-0"])
    failures = {
        arm.name: json.loads((out / "runs" / f"{arm.name}--seed-0/failure.json").read_text())
        for arm in broken
    }
    assert "nowhere" in failures["no-model"]["error"]
    assert "Traceback" in failures["no-model"]["traceback"]
    assert "SIGKILL" in failures["dying"]["error"]
    for arm in study.arms[2:]:
        name = f"{arm.name}--seed-0"
        tree = run_tree(study, arm, 0, out=tmp_path / "undisturbed", models=tmp_path)
        undisturbed = train_config(parse_config(tree))
        assert numbers(out / "runs" / name) == numbers(undisturbed.folder)
        held_out = json.loads((out / "runs" / name / "evaluation.json").read_text())
        assert held_out["low"] <= held_out["mean_reward"] <= held_out["high"]
        assert held_out["num_prompts"] == 512
        checkpoint = newest_checkpoint(out / "runs" / name / "checkpoints")
        assert checkpoint is not None
        assert not (checkpoint / "trainer").exists()

    # what has failed is tried again only when asked, and no worker is started without time
    again = run_jobs(jobs, pace=Pace(), logs=out / "none", lock=0)
    assert (again.done, len(again.failed), again.left) == (2, 2, [])
    later = run_jobs(jobs, pace=Pace(seconds=0.0), logs=out / "none", lock=0, retry_failed=True)
    assert later.left == ["no-model--seed-0", "dying--seed-0"]
    assert not (out / "none").exists()


def test_a_run_that_is_asked_to_stop_goes_on_to_the_same_numbers(
    tiny_folder: Path, tmp_path: Path
) -> None:
    study, _ = requested(small(tiny_folder, tmp_path))
    study = replace(study, base={**study.base, "run": {"checkpoint_every": 8}})
    answers = iter([False, False, True])
    config = parse_config(run_tree(study, study.arms[0], 0, out=tmp_path / "a", models=tmp_path))
    stopped = train_config(config, is_asked_to_stop=lambda: next(answers))
    assert stopped.checkpoint.name == "step-3"
    assert stopped.checkpoint.is_dir()
    assert len(stopped.metrics) == 3
    status = json.loads((stopped.folder / "status.json").read_text())
    assert status["state"] == "stopped"
    whole = parse_config(run_tree(study, study.arms[0], 0, out=tmp_path / "b", models=tmp_path))
    assert numbers(train_config(config).folder) == numbers(train_config(whole).folder)


def test_two_processes_cannot_run_one_study(tmp_path: Path) -> None:
    first, second = StudyFolder(tmp_path), StudyFolder(tmp_path)
    first.lock()
    with pytest.raises(ConfigError, match="Another process runs the study"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_folder_holds_one_study_and_gathers_its_arms(tmp_path: Path, tiny_folder: Path) -> None:
    study, _ = requested(small(tiny_folder, tmp_path))
    folder = StudyFolder(tmp_path)
    p3o, grpo = study.arms
    folder.write(replace(study, arms=(p3o,)), about={}, state="finished")
    folder.write(replace(study, arms=(grpo,), seeds=(1,)), about={}, state="finished")
    written = folder.read()
    assert written is not None
    assert {arm["name"] for arm in written["arms"]} == {"p3o", "grpo-0.2"}
    assert written["seeds"] == [0, 1]
    other = replace(study, base={**study.base, "seed": 5})
    with pytest.raises(ConfigError, match="another configuration"):
        folder.write(other, about={}, state="running")


def test_benchmarks_of_two_studies_do_not_share_a_folder(tmp_path: Path) -> None:
    study = DEFINITIONS["clip"](SCALES["cpu"])
    base = Arm(name=BASE_MODEL, label="Base model", changes={})
    study = replace(study, name="benchmarks", arms=(base, *study.arms))
    folder = StudyFolder(tmp_path)
    folder.write(study, about={}, state="finished")
    folder.write(study, about={}, state="finished")
    with pytest.raises(ConfigError, match="another configuration"):
        folder.write(replace(study, base={"seed": 5}), about={}, state="running")
    with pytest.raises(ConfigError, match="another title"):
        folder.write(replace(study, title="Benchmarks of async"), about={}, state="running")


def test_too_few_minutes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert main(["study", "clip", "--minutes", "0.1", "--out", str(out)]) == 2
    assert "give more than 0.12" in capsys.readouterr().err
    assert not out.exists()


def test_a_run_that_does_not_stop_is_ended_when_the_time_is_over(
    tiny_folder: Path, tmp_path: Path
) -> None:
    study, _ = requested(small(tiny_folder, tmp_path))
    (job, *_) = training_jobs(study, out=tmp_path, models=tmp_path, held_out=None)
    # the worker has not even imported torch by then
    pace = Pace(seconds=0.2, end_seconds=0.2)
    lock = StudyFolder(tmp_path).lock()
    tally = run_jobs([job], pace=pace, logs=tmp_path / "logs", lock=lock)
    assert tally.left == [job.name]
    assert not job.path.exists()


def test_compiled_layers_are_kept_for_runs_of_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes longer than a short run, and graphs fit every model of the same shape."""
    forgotten: list[str] = []
    monkeypatch.setattr(execute_module, "execute", lambda *_, **__: "finished")
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(job.name))
    worker = Worker()
    for number, name in enumerate("aabba"):
        details = {"tree": {"model": {"name": name}, "seed": number}}
        job = Job(kind="train", name=f"{number}-{name}", folder=str(tmp_path), details=details)
        assert worker.do(job, None) == "finished"
    assert forgotten == ["0-a", "2-b", "4-a"]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
def test_minutes_are_kept_by_runs_that_do_not_stop(scale: Scale) -> None:
    pace = requested_pace(options(["clip", "--minutes", "60"]), scale, time.monotonic())
    assert pace.seconds is not None
    assert pace.seconds + pace.end_seconds < 3600.0


def test_what_failed_after_its_evaluation_is_not_done(tiny_folder: Path, tmp_path: Path) -> None:
    study, _ = requested(small(tiny_folder, tmp_path))
    (job, *_) = training_jobs(study, out=tmp_path, models=tmp_path, held_out=None)
    (job.path / "checkpoints/step-8").mkdir(parents=True)
    (job.path / "metrics.jsonl").write_text('{"step": 8}\n')
    assert job.is_done
    write_failure(job.path, "OSError: No space left on device", "")
    tally = run_jobs([job], pace=Pace(), logs=tmp_path / "logs", lock=0)
    assert (tally.done, tally.failed) == (0, [job.name])


def test_a_job_travels_as_json(tiny_folder: Path, tmp_path: Path) -> None:
    study, scale = requested(small(tiny_folder, tmp_path))
    (job, *_) = training_jobs(study, out=tmp_path, models=tmp_path, held_out=scale.held_out)
    received = Job(**json.loads(json.dumps(job.to_dict())))
    assert received.details == job.details
    assert not received.is_done


def test_of_every_checkpoint_of_a_finished_run_the_model_alone_is_kept(
    tmp_path: Path, tiny_folder: Path
) -> None:
    tree = {
        "model": {"name": str(tiny_folder), "device": "cpu"},
        "task": {"name": "arithmetic"},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 2},
        "training": {"steps": 2},
        "run": {"folder": str(tmp_path), "name": "run", "checkpoint_every": 1},
    }
    details = {"tree": tree, "steps": 2, "held_out": None}
    job = Job(kind="train", name="run", folder=str(tmp_path / "run"), details=details)
    assert Worker().do(job, None) == "finished"
    for step in ("step-1", "step-2"):
        kept = {path.name for path in (job.path / "checkpoints" / step).iterdir()}
        assert "model.safetensors" in kept
        assert "trainer" not in kept
