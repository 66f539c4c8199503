"""Ungraded samples count neither as correct nor as wrong, and are reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from trustbatch.errors import ConfigError
from trustbatch.evaluation.folder import EvaluationFolder
from trustbatch.evaluation.report import results_table
from trustbatch.evaluation.results import (
    EvaluationResults,
    ProblemOutcome,
    read_results,
    score_tasks,
)
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.tasks import build_task
from trustbatch.types import Prompt

SETTINGS = {
    "samples": 4,
    "temperature": 1.0,
    "top_p": 0.95,
    "max_tokens": 8,
    "seed": 0,
    "engine": "native",
    "precision": "float32",
    "tasks": {"t": {"problems": 2, "digest": "d"}},
}


def record(problem: str, rewards: list[float | None], **changes: Any) -> dict[str, Any]:
    samples = [
        {
            "text": "x",
            "tokens": 3,
            "finish_reason": "stop",
            "status": "graded" if reward is not None else "timed_out",
            "reward": reward,
            **changes,
        }
        for reward in rewards
    ]
    return {"task": "t", "id": problem, "prompt": "p", "answer": "a", "samples": samples}


def outcome(rewards: list[float | None], **changes: Any) -> ProblemOutcome:
    return ProblemOutcome.of_record(record("p", rewards, **changes))


def test_an_ungraded_sample_leaves_its_problem_with_one_sample_fewer() -> None:
    found = outcome([1.0, None, 0.0, None])
    assert (found.samples, found.graded, found.correct) == (4, 2, 1)
    assert found.mean_reward == 0.5
    (scores,) = score_tasks({"t": [found, outcome([1.0, 1.0, 1.0, 1.0])]})
    assert scores.num_ungraded == 2
    assert scores.pass_at_k[0].value == 0.75  # not 0.625, as if they were wrong
    assert [score.num_problems for score in scores.pass_at_k] == [2, 2, 1, 1]
    assert scores.pass_at_k[3].value == 1.0


def test_a_problem_without_any_grade_is_left_out_and_counted() -> None:
    (scores,) = score_tasks({"t": [outcome([None, None]), outcome([0.0, 1.0])]})
    assert (scores.num_problems, scores.num_ungraded) == (2, 2)
    assert (scores.pass_at_k[0].value, scores.pass_at_k[0].num_problems) == (0.5, 1)
    (nothing,) = score_tasks({"t": [outcome([None, None])]})
    assert nothing.pass_at_k == ()
    assert nothing.mean_reward is None


def test_the_table_shows_their_number_and_the_rule() -> None:
    outcomes = {"t": [outcome([1.0, None, 0.0, None]), outcome([1.0] * 4)]}
    table = results_table(EvaluationResults(model="m", settings=SETTINGS, outcomes=outcomes))
    assert "| t | 2 | 0.750 (" in table
    assert "| 0.0% | 2 | 3 |" in table
    assert "count neither as correct nor as wrong" in table
    assert "pass@4 of t is over 1 of 2 problems." in table
    whole = {"t": [outcome([1.0] * 4)]}
    assert "neither" not in results_table(
        EvaluationResults(model="m", settings=SETTINGS, outcomes=whole)
    )


def test_a_sample_is_right_from_reward_one_on() -> None:
    assert outcome([0.99, 1.0, 1.2, -1.0]).correct == 2


def test_truncated_samples_are_counted() -> None:
    assert outcome([1.0, 0.0], finish_reason="length").truncated == 2


def open_folder(path: Path, **changes: Any) -> EvaluationFolder:
    return EvaluationFolder(path, model="m", settings={**SETTINGS, **changes})


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    for problem in ("a", "b"):
        folder.add(record(problem, [1.0, None, 0.0, 0.0]))
    problems = tuple(Prompt(id=each, text="p", answer="a") for each in "ab")
    suite = [EvaluatedTask("t", build_task("arithmetic", seed=0), problems)]
    written = folder.finish(suite, {"python": "3"})
    with pytest.raises(ConfigError, match="Another process is evaluating in"):
        open_folder(tmp_path)
    folder.close()
    assert read_results(tmp_path) == written
    again = open_folder(tmp_path)
    assert again.done("t") == {"a", "b"}
    again.close()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    with pytest.raises(ConfigError, match=r"has no results\.json"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"model": "m"}))
    with pytest.raises(ConfigError, match=r"can't be read .*: delete it"):
        read_results(tmp_path)
    open_folder(tmp_path, samples=5).close()  # nothing was sampled yet, so nothing binds
    (tmp_path / "samples.jsonl").write_text('{"task": 1}\n')
    with pytest.raises(ConfigError, match=r"Line 1 of .* can't be read: remove the line"):
        open_folder(tmp_path, samples=5)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON: delete"):
        open_folder(tmp_path)
