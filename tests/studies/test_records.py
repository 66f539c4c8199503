"""Records: a line for each finished run, which the next machine leaves out."""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trustbatch.api import train_config
from trustbatch.cli import main
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.studies.command import add_study_arguments, requested_study
from trustbatch.studies.definitions import DEFINITIONS
from trustbatch.studies.execute import execute
from trustbatch.studies.folder import StudyFolder, write_failure
from trustbatch.studies.jobs import Job, Records, training_jobs
from trustbatch.studies.records import (
    append_record,
    key_of,
    portable_evaluation,
    portable_tree,
    read_records,
    step_numbers,
)
from trustbatch.studies.results import RunState, read_study
from trustbatch.studies.runner import Pace, _Runner
from trustbatch.studies.scales import build_scale

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "gpu" / "runs.jsonl"


def line(**changes: Any) -> dict[str, Any]:
    found = {"regime": "fresh", "arm": "pact", "seed": 1, "held_out": 0.25, "standard_error": 0.1}
    return found | {"steps": {"reward/mean": [0.5, 0.75]}, "commit": "abc"} | changes


def jobs_of(words: list[str], file: Path, out: Path, *, num_prompts: int = 16) -> list[Job]:
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    study, scale = requested_study(parser.parse_args(words))
    assert scale.held_out is not None
    held_out = replace(scale.held_out, num_prompts=num_prompts, num_samples=2)
    return training_jobs(
        study, out=out, models=out / "models", held_out=held_out, records=Records(file=file)
    )


def small(tiny_folder: Path, *more: str) -> list[str]:
    settings = ["rollout.prompts_per_step=4", "training.mini_batches=6", "run.ledger_every=0"]
    return [
        *("evidence", "--scale", "smoke", "--seeds", "3,", "--steps", "2"),
        *("--model", str(tiny_folder), *more),
        *(word for setting in settings for word in ("--set", setting)),
    ]


def run(job: Job) -> str:
    return execute(job, is_asked_to_stop=lambda: False)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.jsonl"
    assert read_records(file) == {}
    append_record(file, line())
    append_record(file, line(arm="grpo", held_out=0.0, failed="Non-finite."))
    found = read_records(file)
    assert list(found) == [("fresh", "pact", 1), ("fresh", "grpo", 1)]
    assert found["fresh", "grpo", 1].error == "Non-finite."
    # 0.25 -+ 1.96 * 0.1
    assert found["fresh", "pact", 1].held_out.interval == pytest.approx((0.054, 0.446))


def test_a_line_that_is_being_written_is_no_run_yet_and_is_written_over(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps(line()) + "\n" + json.dumps(line(seed=2))[:30])
    assert list(read_records(file)) == [("fresh", "pact", 1)]
    append_record(file, line(seed=3))
    assert [seed for *_, seed in read_records(file)] == [1, 3]
    assert len(file.read_text().splitlines()) == 2
    # a whole line to which an editor gave no end
    file.write_text(file.read_text().rstrip())
    append_record(file, line(seed=4))
    assert [seed for *_, seed in read_records(file)] == [1, 3, 4]


def test_a_run_that_two_have_finished_is_recorded_once(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    for held_out in (0.25, 0.5):
        append_record(file, line(held_out=held_out))
    (record,) = read_records(file).values()
    assert record.held_out.mean_reward == 0.25


def test_a_finished_run_is_kept_beside_a_bad_line(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text("<<<<<<< HEAD\n" + json.dumps(line()) + "\n")
    append_record(file, line(seed=2))
    assert json.loads(file.read_text().splitlines()[-1])["seed"] == 2
    with pytest.raises(ConfigError, match=r"Line 1 of .* is no record"):
        read_records(file)


def test_problems_are_the_same_from_the_hub_and_from_a_folder() -> None:
    (hub, folder) = (build_scale("gpu", data=data).held_out for data in (None, "/elsewhere"))
    assert hub is not None
    assert folder is not None
    assert hub.task != folder.task
    assert portable_evaluation(asdict(hub)) == portable_evaluation(asdict(folder))


def test_many_processes_write_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trustbatch.studies.records import append_record"
        "\nprint(flush=True); input()  # all begin at once"
        "\nfor seed in range(20): append_record(Path(sys.argv[1]), {'regime': 'fresh', 'arm':"
        " sys.argv[2], 'seed': seed, 'held_out': 0.5, 'more': 'x' * 100_000})"
    )
    file, pipe = tmp_path / "runs.jsonl", subprocess.PIPE
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(file), arm], stdin=pipe, stdout=pipe, text=True
        )
        for arm in ("a", "a", "b")
    ]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = read_records(file)
    assert sorted(found) == [("fresh", arm, seed) for arm in ("a", "b") for seed in range(20)]


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("{half", "Line 2 of .* is no record of a run .*: remove it."),
        ('{"regime": "fresh"}', "Line 2 of .* is no record of a run"),
        (json.dumps(line()), "fresh--pact--1 is there twice in .*: remove line 2."),
        (json.dumps(line(seed=2, held_out=math.nan)), "fresh--pact--2 has no held-out reward"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, last: str, said: str) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps(line()) + "\n" + last + "\n")
    with pytest.raises(ConfigError, match=said):
        read_records(file)


def test_what_is_kept_of_the_steps() -> None:
    rows = [
        {"step": 0, "evaluation/mean_reward": 0.5, "entropy": 9.0},  # before training
        {"step": 1, "entropy": 1.234567, "ledger/lag/one_minus_ess": 0.5, "time/train_seconds": 1},
        {"step": 2, "entropy": math.nan, "reward/mean": 1, "ledger/position/0-1/ratio_mean": 1.0},
    ]
    assert step_numbers(rows) == {
        "entropy": [1.2346, None],
        "ledger/lag/one_minus_ess": [0.5, None],
        "reward/mean": [None, 1.0],
    }


def test_nothing_of_the_machine_is_in_a_record() -> None:
    tree = {
        "seed": 1,
        "model": {"name": "/home/me/model", "precision": "float32"},
        "task": {"name": "gsm8k", "path": "/home/me/data"},
        "rollout": {"policies": [{"name": "other", "model": "/home/me/large", "share": 0.5}]},
        "training": {"reference_model": "/home/me/reference"},
        "run": {"folder": "/home/me/runs"},
    }
    found = portable_tree(tree)
    assert "/home" not in json.dumps(found)
    assert found["rollout"]["policies"][0] == {"name": "other", "model": "large", "share": 0.5}
    assert found["model"] == {"name": "model", "precision": "float32"}
    assert found["training"] == {"reference_model": "reference"}
    assert tree["model"]["name"] == "/home/me/model"


def test_a_run_leaves_a_record_and_no_weights(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    words = small(tiny_folder, "--arms", "fresh-grpo")
    (job,) = jobs_of(words, file, tmp_path)
    assert not job.is_done
    assert run(job) == "finished"
    assert job.is_done
    ((key, record),) = read_records(file).items()
    assert key == ("fresh", "grpo", 3)
    assert not list((job.path / "checkpoints").glob("step-*"))
    assert str(tmp_path) not in file.read_text()
    assert 0.0 <= record.held_out.mean_reward <= 1.0
    assert record.held_out.num_prompts == 16
    (again,) = jobs_of(words, file, tmp_path / "other machine")
    assert again.is_done
    # the same run once more, to the same numbers
    file.rename(tmp_path / "first.jsonl")
    assert run(again) == "finished"
    (second,) = read_records(file).values()
    for recorded in (record.line["steps"], second.line["steps"]):
        recorded.pop("time/step_seconds")
    assert record.line["steps"] == second.line["steps"]
    assert record.line["held_out"] == second.line["held_out"]


def test_steps_of_the_command_line_are_those_of_every_arm(
    tiny_folder: Path, tmp_path: Path
) -> None:
    words = small(tiny_folder, "--arms", "fresh-grpo,lag8-grpo")
    assert [job.details["steps"] for job in jobs_of(words, tmp_path / "r", tmp_path)] == [2, 2]
    words = ["evidence", "--scale", "gpu", "--arms", "fresh-grpo,lag8-grpo", "--seeds", "1,"]
    assert [job.details["steps"] for job in jobs_of(words, tmp_path / "r", tmp_path)] == [16, 24]


def test_a_run_that_is_stopped_leaves_no_record(tiny_folder: Path, tmp_path: Path) -> None:
    (job,) = jobs_of(small(tiny_folder, "--arms", "fresh-grpo"), tmp_path / "r.jsonl", tmp_path)
    assert execute(job, is_asked_to_stop=lambda: True) == "stopped"
    assert not job.is_done
    assert not (tmp_path / "r.jsonl").exists()


def test_a_run_that_diverges_counts_as_one_that_learned_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    words = small(tiny_folder, "--arms", "fresh-grpo", "--set", "training.learning_rate=1e38")
    (job,) = jobs_of(words, tmp_path / "r.jsonl", tmp_path)
    assert run(job) == "finished"
    (record,) = read_records(tmp_path / "r.jsonl").values()
    assert record.held_out.mean_reward == 0.0
    assert "optimizer steps had no usable gradient" in record.error


def test_a_run_that_ends_with_a_broken_model_counts_as_one_that_learned_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """The only update is that of the last step, so it shows in the evaluation alone."""
    broken = ["training.learning_rate=1e38", "training.warmup_fraction=0"]
    words = [
        *small(tiny_folder, "--arms", "fresh-grpo", "--steps", "1"),
        *(word for setting in broken for word in ("--set", setting)),
        *("--set", "training.mini_batches=1"),
    ]
    (job,) = jobs_of(words, tmp_path / "r.jsonl", tmp_path)
    assert run(job) == "finished"
    (record,) = read_records(tmp_path / "r.jsonl").values()
    assert record.num_steps == 1
    assert record.held_out.mean_reward == 0.0
    assert record.error


def test_a_run_that_failed_here_is_done_once_it_is_recorded(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "runs.jsonl"
    (job,) = jobs_of(small(tiny_folder, "--arms", "fresh-grpo"), file, tmp_path)
    write_failure(job.path, "The worker process was killed.", "")
    assert not job.is_done
    append_record(file, line(arm="grpo", seed=3))
    assert job.is_done


def test_a_checkpoint_of_another_start_is_not_gone_on_from(
    tiny_folder: Path, tmp_path: Path
) -> None:
    (job,) = jobs_of(small(tiny_folder, "--arms", "fresh-grpo"), tmp_path / "r.jsonl", tmp_path)
    tree = job.details["tree"]
    train_config(parse_config(tree | {"run": tree["run"] | {"keep_checkpoints": 1}}))
    with pytest.raises(ConfigError, match="has checkpoints of a run without --records"):
        run(job)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--steps", "3"), r"training\.steps was 2, now 3\): choose another"),
        (("--set", "model.lora.rank=4"), r"model\.lora.* was None, now "),
        (("--set", "rollout.max_tokens=7"), r"rollout\.max_tokens was \d+, now 7"),
        (("--set", "reward.truncated=leave_out"), r"reward\.truncated was grade, now leave_out"),
        (("--model", "/elsewhere/other"), r"model\.name was .*, now other"),
    ],
)
def test_a_record_of_another_configuration_is_refused(
    tiny_folder: Path, tmp_path: Path, change: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "runs.jsonl"
    words = small(tiny_folder, "--arms", "fresh-grpo")
    (job,) = jobs_of(words, file, tmp_path)
    append_record(file, line_of(job))
    jobs_of(words, file, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=said):
        jobs_of([*words, *change], file, tmp_path)


def test_a_record_counts_whether_or_not_layers_were_compiled(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "runs.jsonl"
    words = small(tiny_folder, "--arms", "fresh-grpo")
    (job,) = jobs_of(words, file, tmp_path)
    append_record(file, line_of(job))
    (again,) = jobs_of([*words, "--set", "training.compile=true"], file, tmp_path)
    assert again.details["tree"]["training"] != job.details["tree"]["training"]
    assert again.is_done


def line_of(job: Job) -> dict[str, Any]:
    """What a finished run would add to the records."""
    held_out = portable_evaluation(job.details["held_out"])
    tree = portable_tree(job.details["tree"])
    return line(arm="grpo", seed=3, config=tree, evaluation=held_out)


def test_a_record_with_another_evaluation_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    words = small(tiny_folder, "--arms", "fresh-grpo")
    append_record(file, line_of(*jobs_of(words, file, tmp_path)))
    with pytest.raises(ConfigError, match=r"held_out\.num_prompts was 16, now 32"):
        jobs_of(words, file, tmp_path, num_prompts=32)


def test_a_record_without_configuration_is_compared_by_objective_and_steps(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "runs.jsonl"
    words = small(tiny_folder, "--arms", "fresh-grpo")
    append_record(file, line(arm="grpo", seed=3, objective={"name": "grpo"}))
    jobs_of(words, file, tmp_path)
    with pytest.raises(ConfigError, match=r"training\.steps was 2, now 3"):
        jobs_of([*words, "--steps", "3"], file, tmp_path)
    # of some runs no step is kept
    file.write_text(json.dumps(line(arm="grpo", seed=3, steps={})) + "\n")
    jobs_of([*words, "--steps", "3"], file, tmp_path)
    file.write_text(json.dumps(line(arm="grpo", seed=3, objective={"name": "dapo"})) + "\n")
    with pytest.raises(ConfigError, match=r"objective\.name was dapo, now grpo"):
        jobs_of(words, file, tmp_path)


def test_a_page_of_records_and_a_run_share_a_folder(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both orders of the documented commands; the page leaves a study's own start alone."""
    file, out = tmp_path / "runs.jsonl", tmp_path / "study"
    file.touch()
    words = ["study", *small(tiny_folder, "--arms", "fresh-grpo", "--records", str(file))]
    page = ["study", "evidence", "--scale", "smoke", "--records", str(file), "--page-only"]
    assert main([*page, "--out", str(out)]) == 0
    assert len(read_study(out).arms) > 1
    assert main([*words, "--out", str(out), "--minutes", "1"]) == 0
    started = StudyFolder(out).read()
    assert started is not None
    assert started["state"] == "finished"
    assert len(read_study(out).arms) == 1
    assert main(["study", "evidence", "--out", str(out), *page[2:], "--arms", "fresh-grpo"]) != 0
    said = capsys.readouterr().err
    assert "has fresh--grpo--3 with another configuration (model.name was tiny, now" in said
    assert main([*words, "--out", str(out), "--page-only"]) == 0
    assert StudyFolder(out).read() == started
    file.rename(tmp_path / "moved.jsonl")
    with pytest.raises(ConfigError, match="where the study keeps its runs, does not exist"):
        read_study(out)


def test_a_page_shows_what_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "runs.jsonl", tmp_path / "page"
    for seed in (1, 2):
        append_record(file, line(seed=seed, held_out=0.5 + 0.1 * seed))
        append_record(file, line(arm="grpo", seed=seed, held_out=0.0, failed="It <diverged>."))
    words = ["study", "evidence", "--scale", "gpu", "--records", str(file), "--out", str(out)]
    assert main([*words, "--steps", "2", "--page-only"]) == 0
    said = capsys.readouterr().out
    assert "on-policy rollouts: Not run: P3O, Decoupled, CISPO" in said
    results = read_study(out)
    arms = {arm.arm.name: arm for arm in results.arms}
    assert arms["fresh-pact"].by_seed(results.measure) == {1: 0.6, 2: 0.7}
    assert [each.state for each in arms["fresh-pact"].runs][:2] == [RunState.FINISHED] * 2
    assert arms["fresh-pact"].runs[0].series("reward/mean") == ([1.0, 2.0], [0.5, 0.75])
    assert arms["fresh-pact"].runs[2].state is RunState.MISSING
    html = (out / "index.html").read_text()
    assert "It &lt;diverged&gt;." in html
    assert "GRPO, on-policy rollouts, seed 1 diverged" in html
    assert "finished, diverged at 2" in html
    assert "unreadable" not in html


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--before"], "--before is for --records: name the file of records, too."),
        (["--records", "r.jsonl", "--no-eval"], "--records is not for --no-eval"),
        (["--records", "no.jsonl", "--page-only"], "no.jsonl does not exist"),
        (["--records", "r.jsonl", "--scale", "paper"], "--records is not for --scale paper, whose"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "evidence", "--scale", "smoke", *words]) != 0
    assert said in capsys.readouterr().err


def test_no_run_is_started_that_could_not_end(tiny_folder: Path, tmp_path: Path) -> None:
    (recorded,) = jobs_of(small(tiny_folder, "--arms", "fresh-p3o"), tmp_path / "r", tmp_path)
    resumable = replace(recorded, details={**recorded.details, "record": None})
    pace = Pace(seconds=100.0, least_seconds=10.0)
    runner = _Runner([], pace=pace, logs=tmp_path, lock=0, retry_failed=False)
    assert runner._has_time(recorded)
    runner._longest = 200.0  # a run took longer than the time that is left
    assert not runner._has_time(recorded)
    assert runner._has_time(resumable)


def test_committed_runs_count_as_those_of_the_study(tmp_path: Path) -> None:
    scale = build_scale("gpu", data=None)
    study = replace(DEFINITIONS["evidence"](scale), seeds=(1, 2, 3, 4, 5))
    jobs = training_jobs(
        study,
        out=tmp_path,
        models=tmp_path,
        held_out=scale.held_out,
        records=Records(file=COMMITTED),
    )
    known = read_records(COMMITTED)
    keys = {key_of(arm, seed) for arm in study.arms for seed in study.seeds}
    # one candidate with another anchor was tried beside the arms of the study
    assert {arm for _, arm, _ in known.keys() - keys} <= {"prox"}
    assert sum(job.is_done for job in jobs) == len(known.keys() & keys) > 75


def test_tables_know_all_arms_and_regimes() -> None:
    path = ROOT / "benchmarks" / "evidence_runs.py"
    spec = importlib.util.spec_from_file_location("evidence_runs", path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    arms = DEFINITIONS["evidence"](build_scale("gpu")).arms
    assert {arm.regime for arm in arms} <= table.REGIMES.keys()
    assert {arm.plain_name for arm in arms} <= table.LABELS.keys()
    assert len(arms) == 14 * 10
