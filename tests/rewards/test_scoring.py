"""From completions to grades: weighted parts, failures, and ungraded completions."""

import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_reward_terms import lengths, serving
from tests.support.own_task import Sized, Unreliable
from tests.support.pool_graders import Odd
from tests.support.rollout_files import read_rollouts, rollout_file, rollout_text
from tests.support.train_sequences import make_completion

import trustbatch
from trustbatch.advantages import group_centered
from trustbatch.batching.sequences import to_sequences
from trustbatch.errors import ConfigError, RewardError
from trustbatch.loops.generate import is_unequal
from trustbatch.observe.completion_log import readable_record
from trustbatch.observe.report import write_report
from trustbatch.observe.rollout_metrics import rollout_metrics
from trustbatch.observe.run_folder import read_metrics
from trustbatch.rewards import Scorer, rewards_of
from trustbatch.rewards.config import RewardConfig
from trustbatch.rollout.records import group_from_record, group_to_record
from trustbatch.tasks.arithmetic import Arithmetic
from trustbatch.types import FinishReason, Grade, GradeStatus, Prompt, RolloutGroup


def group_of(*completions: str, answer: str = "", details: dict[str, Any] | None = None) -> Any:
    return RolloutGroup(
        prompt=Prompt(id="7", text="question", answer=answer, details=details or {}),
        prompt_token_ids=(1,),
        completions=tuple(
            replace(make_completion([1] * (number + 1), sample=number), text=text)
            for number, text in enumerate(completions)
        ),
    )


@contextmanager
def scorer_of(task: Any, *, max_tokens: int | None = None, **table: Any) -> Iterator[Scorer]:
    reward = RewardConfig.model_validate({"time_limit": 1.0, "workers": 2, **table})
    scorer = Scorer(task, reward, max_tokens=max_tokens)
    yield scorer
    scorer.close()


def test_rewards_have_one_row_per_group() -> None:
    with scorer_of(Odd()) as scorer:
        groups = scorer.score([group_of("ok", "ok")] * 3)
    assert rewards_of(groups).tolist() == [[1.0, 1.0]] * 3
    assert groups[0].grades[0] == Grade(reward=1.0)


def test_grader_failures_are_not_rewards() -> None:
    completions = ["ok", "raise", "nan", "inf", "text", "sleep", "memory", "exit"]
    with scorer_of(Odd(), memory_limit_gib=0.5) as scorer:
        (group,) = scorer.score([group_of(*completions)])
    assert [grade.status.value for grade in group.grades] == [
        "graded", "failed", "failed", "failed", "failed", "timed_out", "out_of_memory", "failed",
    ]  # fmt: skip
    assert [math.isnan(grade.reward) for grade in group.grades] == [False, *[True] * 7]
    assert "task returned nan, which is not a number from -1e12 to 1e12" in group.grades[2].reason
    assert "task returned '1'" in group.grades[4].reason


def num_processes(scorer: Scorer) -> dict[str, int]:
    return {name: len(pool._processes) for name, pool in scorer._pools.items()}


def test_no_more_processes_are_started_than_there_are_samples() -> None:
    path = "tests.support.pool_graders:batch_lengths"
    terms = [{"name": "task"}, {"name": "batch_function", "path": path}]
    with scorer_of(Odd(), workers=3, terms=terms) as scorer:
        scorer.start(2)
        assert num_processes(scorer) == {"terms": 2, "batch:batch_lengths": 1}
        scorer.start(8)
        assert num_processes(scorer) == {"terms": 3, "batch:batch_lengths": 1}
        (group,) = scorer.score([group_of("ok", "four")])
    assert [grade.reward for grade in group.grades] == [3.0, 5.0]
    with scorer_of(Arithmetic()) as scorer:
        scorer.start(2)
        assert num_processes(scorer) == {}


def test_a_grader_that_cannot_be_sent_is_said_when_it_grades(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Local(Odd):
        pass

    with scorer_of(Local()) as scorer:
        scorer.start(2)
        assert not caplog.text
        for _ in range(2):
            scorer.score([group_of("ok", "ok")])
            scorer.start(2)
        assert num_processes(scorer) == {}
    assert caplog.text.count("can't be sent to another process") == 1


def test_a_reward_that_no_batch_could_average_is_refused() -> None:
    with scorer_of(Odd(), terms=[{"name": "task"}]) as scorer:
        (group,) = scorer.score([group_of("ok", "1e308")])
    assert [grade.status.value for grade in group.grades] == ["graded", "failed"]
    assert "returned 1e+308, which is not a number from -1e12 to 1e12" in group.grades[1].reason
    terms = [{"name": "task", "weight": 1e13}]
    with scorer_of(Odd(), terms=terms) as scorer:
        (group,) = scorer.score([group_of("ok", "ok")])
    assert "the weighted sum" in group.grades[0].reason


class Painter(Odd):
    grades_in_process = True

    def grade(self, prompt: Prompt, completion: str) -> float:
        raise ValueError("\x1b[2Jcleared")


def test_a_reason_can_not_control_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    with scorer_of(Painter()) as scorer:
        scorer.score([group_of("ok", "ok")])
    assert "cleared" in caplog.text
    assert "\x1b" not in caplog.text


class Interrupted(Odd):
    grades_in_process = True

    def grade(self, prompt: Prompt, completion: str) -> float:
        raise KeyboardInterrupt


def test_an_interrupt_gets_through_a_grader_in_this_process() -> None:
    with scorer_of(Interrupted()) as scorer, pytest.raises(KeyboardInterrupt):
        scorer.score([group_of("ok", "ok")])


def test_ungraded_completions_are_left_out_of_statistics_and_batch() -> None:
    with scorer_of(Odd()) as scorer:
        groups = scorer.score([group_of("ok", "raise", "ok"), group_of("raise", "ok", "exit")])
    advantages = group_centered(rewards_of(groups))
    assert len(to_sequences(groups, advantages)) == 3
    metrics = rollout_metrics(groups, policy="p", version=0)
    assert metrics["reward/mean"] == 1.0
    assert metrics["reward/std"] == 0.0
    assert metrics["reward/failed"] == 3.0
    assert metrics["reward/timed_out"] == metrics["reward/out_of_memory"] == 0.0
    assert metrics["reward/equal_groups_fraction"] == 1.0
    assert not any(map(math.isnan, metrics.values()))


def test_nothing_graded_has_no_mean() -> None:
    with scorer_of(Odd()) as scorer:
        groups = scorer.score([group_of("raise", "raise")])
    metrics = rollout_metrics(groups, policy="p", version=0)
    assert "reward/mean" not in metrics
    assert metrics["reward/failed"] == 2.0
    assert to_sequences(groups, group_centered(rewards_of(groups))) == []


def test_metrics_of_several_policies_leave_out_the_ungraded() -> None:
    with scorer_of(Odd()) as scorer:
        (group,) = scorer.score([group_of("ok", "raise", "raise")])
    other = replace(group.completions[2], provenance=replace(
        group.completions[2].provenance, policy="second"))  # fmt: skip
    group = replace(group, completions=(*group.completions[:2], other))
    metrics = rollout_metrics([group], policy="p", version=0)
    assert metrics["policy/p/reward"] == 1.0
    assert metrics["policy/second/share"] == pytest.approx(1 / 3)
    assert "policy/second/reward" not in metrics


def test_ungraded_completions_can_get_a_fixed_reward() -> None:
    with scorer_of(Odd(), ungraded=-1.0) as scorer:
        (group,) = scorer.score([group_of("ok", "raise")])
    assert [grade.reward for grade in group.grades] == [1.0, -1.0]
    assert group.grades[1].status is GradeStatus.FAILED


def test_a_run_can_stop_at_the_first_failure() -> None:
    with (
        scorer_of(Odd(), ungraded="stop") as scorer,
        pytest.raises(RewardError, match=r"failed on prompt '7': ValueError: no such answer; fix"),
    ):
        scorer.score([group_of("ok", "raise")])


def test_several_batches_without_a_grade_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with scorer_of(Odd()) as scorer:
        for _ in range(2):
            scorer.score([group_of("raise", "raise")])
        scorer.score([group_of("ok", "raise")])
        for _ in range(2):
            scorer.score([group_of("raise", "raise")])
        with pytest.raises(RewardError, match="No completion of the last 3 batches"):
            scorer.score([group_of("raise", "raise")])
    assert "1 of 2 completions could not be graded; the first is of prompt '7'" in caplog.text


def cut(group: RolloutGroup, *which: int, reason: FinishReason = FinishReason.LENGTH) -> Any:
    completions = list(group.completions)
    for number in which:
        completions[number] = replace(completions[number], finish_reason=reason)
    return replace(group, completions=tuple(completions))


def test_truncated_completions_are_graded_by_default() -> None:
    with scorer_of(Arithmetic()) as scorer:
        (group,) = scorer.score([cut(group_of("46", "47", answer="46"), 0)])
    assert [grade.reward for grade in group.grades] == [1.0, 0.0]
    assert rollout_metrics([group], policy="p", version=0)["reward/truncated"] == 0.0


def test_truncated_completions_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    sampled = [
        cut(group_of("46", "47", "46", answer="46"), 0),
        cut(group_of("46", "46", "47", answer="46"), 2),
    ]
    with scorer_of(Arithmetic(), truncated="leave_out", ungraded=-5.0) as scorer:
        groups = scorer.score(sampled)
    first, second = (group.grades for group in groups)
    assert first[0].status is second[2].status is GradeStatus.TRUNCATED
    assert math.isnan(first[0].reward)  # not the number of reward.ungraded
    assert [grade.reward for grade in first[1:]] == [0.0, 1.0]
    assert [grade.reward for grade in second[:2]] == [1.0, 1.0]
    assert not caplog.text  # no grader failed
    advantages = group_centered(rewards_of(groups))
    assert advantages.tolist()[0][1:] == [-0.5, 0.5]
    assert [s.completion.sample for s in to_sequences(groups, advantages)] == [1, 2, 0, 1]
    metrics = rollout_metrics(groups, policy="p", version=0)
    assert metrics["reward/truncated"] == 2.0
    assert metrics["reward/failed"] == 0.0
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/equal_groups_fraction"] == 0.5
    assert metrics["response/truncated_fraction"] == pytest.approx(1 / 3)
    assert [is_unequal(group) for group in groups] == [True, False]


def test_an_episode_out_of_turns_is_not_truncated() -> None:
    group = cut(group_of("46", answer="46"), 0, reason=FinishReason.TURNS)
    with scorer_of(Arithmetic(), truncated="leave_out") as scorer:
        assert scorer.score([group])[0].grades == (Grade(reward=1.0),)


def test_no_term_sees_left_out_completions() -> None:
    terms = [{"name": "batch_function", "path": "tests.support.pool_graders:batch_lengths"}]
    with scorer_of(Arithmetic(), terms=terms, truncated="leave_out", ungraded="stop") as scorer:
        # this function returns no number for "nan", which would end the run
        (group,) = scorer.score([cut(group_of("a", "nan", "abc"), 1)])
        (empty,) = scorer.score([cut(group_of("nan"), 0)])
    assert [group.grades[0].reward, group.grades[2].reward] == [1.0, 3.0]
    assert [grade.status for grade in empty.grades] == [GradeStatus.TRUNCATED]


def test_several_fully_truncated_batches_end_the_run() -> None:
    with scorer_of(Odd(), truncated="leave_out") as scorer:
        scorer.score([cut(group_of("ok", "ok"), 0, 1)])
        scorer.score([cut(group_of("raise", "ok"), 1)])  # nothing graded either
        with pytest.raises(RewardError, match=r"raise rollout.max_tokens, or set reward.truncated"):
            scorer.score([cut(group_of("ok", "ok"), 0, 1)])


def test_an_evaluation_grades_truncated_completions() -> None:
    reward = RewardConfig(truncated="leave_out")
    assert reward.limits.truncated == "grade"
    with scorer_of(Arithmetic(), **reward.limits.model_dump()) as scorer:
        (group,) = scorer.score([cut(group_of("46", answer="46"), 0)])
    assert group.grades[0].reward == 1.0


def test_unpicklable_graders_run_in_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Local(Odd):
        pass

    with scorer_of(Local()) as scorer:
        for _ in range(2):
            (group,) = scorer.score([group_of("ok", "raise", "nan")])
        assert not scorer._pools
    statuses = [grade.status for grade in group.grades]
    assert statuses == [GradeStatus.GRADED, GradeStatus.FAILED, GradeStatus.FAILED]
    assert caplog.text.count("it runs in this one, without limits") == 1


def test_trusted_graders_need_no_process() -> None:
    with scorer_of(Arithmetic()) as scorer:
        (group,) = scorer.score([group_of("46", "47", answer="46")])
        assert not scorer._pools
    assert [grade.reward for grade in group.grades] == [1.0, 0.0]


def test_weighted_parts_add_up() -> None:
    terms = [
        {"name": "task", "weight": 2.0},
        {"name": "math", "weight": 0.5},
        {"name": "format", "boxed": True, "weight": 0.25},
        {"name": "overlong", "buffer": 2},
        {"name": "function", "path": "tests.support.pool_graders:brevity", "weight": -1.0},
        {"name": "function", "path": "tests.support.pool_graders:with_details", "label": "bonus"},
        {
            "name": "batch_function",
            "path": "tests.support.pool_graders:batch_lengths",
            "weight": 0.01,
        },
    ]
    group = group_of("5", r"\boxed{5}", r"\boxed{6}", answer="5", details={"bonus": 0.125})
    with scorer_of(Arithmetic(), terms=terms, max_tokens=4) as scorer:
        (graded,) = scorer.score([group])
    parts = [dict(grade.parts) for grade in graded.grades]
    assert parts[1] == {
        "task": 0.0, "math": 1.0, "format": 1.0, "overlong": 0.0, "brevity": 0.1, "bonus": 0.125,
        "batch_lengths": 9.0,
    }  # fmt: skip
    assert graded.grades[1].reward == pytest.approx(0.5 + 0.25 - 0.1 + 0.125 + 0.09)
    assert [part["overlong"] for part in parts] == [0.0, 0.0, -0.5]
    assert [part["task"] for part in parts] == [1.0, 0.0, 0.0]
    metrics = rollout_metrics([graded], policy="p", version=0)
    assert metrics["reward/math/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/overlong/mean"] == pytest.approx(-1 / 6)


def test_a_part_that_fails_leaves_the_whole_ungraded() -> None:
    terms = [
        {"name": "task"},
        {"name": "batch_function", "path": "tests.support.pool_graders:batch_lengths"},
    ]
    with scorer_of(Arithmetic(), terms=terms) as scorer:
        (group,) = scorer.score([group_of("5", "nan", answer="5")])
    assert group.grades[0].reward == 2.0
    assert group.grades[1].status is GradeStatus.FAILED
    assert group.grades[1].reason.startswith("batch_lengths: ")


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("batch_too_short", GradeStatus.FAILED, "it returned 1 rewards for 2 completions"),
        (
            "batch_forever",
            GradeStatus.TIMED_OUT,
            "longer than 0.5 seconds (time_limit of the term batch_forever)",
        ),
    ],
)
def test_a_batch_function_fails_for_all(function: str, status: GradeStatus, words: str) -> None:
    term = {
        "name": "batch_function",
        "path": f"tests.support.pool_graders:{function}",
        "time_limit": 0.5,
    }
    with scorer_of(Arithmetic(), terms=[term]) as scorer:
        (group,) = scorer.score([group_of("a", "b")])
    assert [grade.status for grade in group.grades] == [status] * 2
    assert words in group.grades[1].reason


def test_an_infinite_sum_is_not_a_reward() -> None:
    terms = [{"name": "task", "weight": 1e308, "label": label} for label in "ab"]
    with scorer_of(Arithmetic(), terms=terms) as scorer:
        (group,) = scorer.score([group_of("5", "6", answer="5")])
    assert [grade.status for grade in group.grades] == [GradeStatus.FAILED, GradeStatus.GRADED]
    assert "the weighted sum of" in group.grades[0].reason


def test_a_batch_function_may_be_called_terms(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def terms(prompts, completions, answers):\n    return [7.0] * len(prompts)\n")
    terms = [
        {"name": "batch_function", "path": f"{file}:terms"},
        {"name": "math", "label": "other"},
    ]
    with scorer_of(Arithmetic(), terms=terms) as scorer:
        (group,) = scorer.score([group_of("5", "6", answer="5")])
    assert [grade.reward for grade in group.grades] == [8.0, 7.0]


def test_a_file_that_breaks_during_a_run_is_not_graded_in_process(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "import os\ndef f(prompt, completion, answer):\n"
        "    return os._exit(1) if completion == 'exit' else 1.0\n"
    )
    with scorer_of(Arithmetic(), terms=[{"name": "function", "path": f"{file}:f"}]) as scorer:
        scorer.score([group_of("a", "exit")])
        file.write_text("broken broken")
        with pytest.raises(RewardError, match=r"could not load the grader .*SyntaxError"):
            scorer.score([group_of(*["exit"] * 6)])
        assert not scorer._graded_in_process


def test_a_server_is_a_part_like_the_others() -> None:
    with serving(lengths) as (url, _):
        terms = [{"name": "http", "url": url, "weight": 2.0}, {"name": "task"}]
        with scorer_of(Arithmetic(), terms=terms) as scorer:
            (group,) = scorer.score([group_of("5", "55", answer="5")])
    assert [grade.reward for grade in group.grades] == [3.0, 4.0]


def test_a_missing_function_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module_at_all\n")
    for path, words in ((f"{file}:f", "No module named"), ("json:nothing", "has no nothing")):
        with (
            scorer_of(Arithmetic(), terms=[{"name": "function", "path": path}]) as scorer,
            pytest.raises(RewardError, match=f"can't be loaded .*{words}"),
        ):
            scorer.score([group_of("a")])
    with pytest.raises(ConfigError, match=r"\[\[reward.terms\]\] can't be used: .*no_such_module"):
        Scorer(
            Arithmetic(),
            RewardConfig.model_validate(
                {"terms": [{"name": "function", "path": "no_such_module:f"}]}
            ),
        )


def test_grades_survive_a_checkpoint_and_are_shown() -> None:
    grades = (
        Grade(reward=0.5, parts={"a": 1.0}),
        Grade(reward=math.nan, status=GradeStatus.TIMED_OUT, reason="it took too long"),
    )
    group = replace(group_of("x", "y"), grades=grades)
    restored = group_from_record(json.loads(json.dumps(group_to_record(group))))
    assert restored.grades[0] == grades[0]
    assert restored.grades[1].status is GradeStatus.TIMED_OUT
    assert math.isnan(restored.grades[1].reward)
    shown = readable_record(group, 1, step=1, advantage=math.nan)
    assert shown["reward"] is None
    assert shown["advantage"] is None
    assert shown["ungraded"] == "timed_out: it took too long"
    assert readable_record(group, 0, step=1, advantage=0.0)["parts"] == {"a": 1.0}


def test_a_run_continues_without_ungraded_completions(tiny_folder: Path, tmp_path: Path) -> None:
    logging.getLogger("trustbatch.rewards.scorer").setLevel(logging.ERROR)
    result = trustbatch.train(
        model=str(tiny_folder),
        task=Unreliable(),
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 4},
        training={"steps": 3, "learning_rate": 1e-3},
        run={"folder": str(tmp_path), "name": "run", "rollouts_every": 1},
    )
    logging.getLogger("trustbatch.rewards.scorer").setLevel(logging.NOTSET)
    first, *others = result.metrics
    assert first["steps/skipped"] == 1.0
    assert first["reward/failed"] == 16.0
    assert "reward/mean" not in first
    for metrics in others:
        assert metrics["steps/skipped"] == 0.0
        assert metrics["reward/failed"] == 8.0
        assert math.isfinite(metrics["policy/loss"])
    assert read_metrics(result.folder) == result.metrics
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report([result.folder], tmp_path / "report.html")
    for file in (result.folder / "rollouts").iterdir():
        for line in rollout_text(file).splitlines():
            row = json.loads(line, parse_constant=pytest.fail)
            assert (row["reward"] is None) == ("ungraded" in row)


def test_a_run_continues_without_truncated_completions(tiny_folder: Path, tmp_path: Path) -> None:
    """Completions that the model did not finish are neither graded nor trained on."""
    result = trustbatch.train(
        model=str(tiny_folder),
        task=Sized(),
        rollout={"prompts_per_step": 4, "samples_per_prompt": 8, "max_tokens": 6},
        reward={"truncated": "leave_out"},
        training={"steps": 3, "learning_rate": 1e-4},
        evaluation={"every": 3, "suite": [{"name": "arithmetic", "level": 1}], "prompts": 8},
        run={"folder": str(tmp_path), "name": "run", "rollouts_every": 1, "rollouts_logged": 32},
    )
    start, *steps = result.metrics
    for metrics in steps:
        num_cut = metrics["reward/truncated"]
        assert 0 < num_cut < 32
        assert metrics["response/truncated_fraction"] == num_cut / 32
        assert metrics["steps/skipped"] == 0.0
        rows = read_rollouts(rollout_file(result.folder, int(metrics["step"])))
        done = [row for row in rows if row["finish_reason"] != "length"]
        assert len(rows) - len(done) == num_cut
        assert metrics["tokens/count"] == sum(row["tokens"] for row in done)
        assert metrics["reward/mean"] == pytest.approx(
            sum(row["reward"] for row in done) / len(done)
        )
        for row in rows:
            assert (row["advantage"] is None) == (row["finish_reason"] == "length")
    for metrics in (start, steps[-1]):  # an evaluation grades all of them
        assert metrics["eval/arithmetic/truncated_fraction"] > 0
        assert metrics["eval/arithmetic/ungraded"] == 0.0


def test_a_stopped_run_can_be_continued(tiny_folder: Path, tmp_path: Path) -> None:
    flag = tmp_path / "fixed"

    class Broken(Arithmetic):
        def grade(self, prompt: Prompt, completion: str) -> float:
            if int(prompt.id.rsplit(":", 1)[1]) >= 4 and not flag.exists():
                raise ValueError("broken")
            return float(len(completion) % 2)

    def run() -> Any:
        return trustbatch.train(
            model=str(tiny_folder),
            task=Broken(),
            rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 4},
            reward={"ungraded": "stop"},
            training={"steps": 4},
            run={"folder": str(tmp_path), "name": "run", "checkpoint_every": 1},
        )

    with pytest.raises(RewardError, match="the same command continues the run"):
        run()
    flag.touch()
    assert [line["step"] for line in run().metrics] == [1, 2, 3, 4]
