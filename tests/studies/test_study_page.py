"""From a study's folder to numbers, words, curves and a page; all expected values made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.chromium import PROGRAM, chromium
from tests.support.fake_study import (
    DAPO,
    GRPO,
    GSPO,
    P3O,
    PAPER_COLUMNS,
    SAMPLE,
    benchmark_study,
    clip_study,
    crossed,
    make_study,
    write_evaluation,
    write_run,
    write_study,
)

from trustbatch.errors import ConfigError
from trustbatch.studies.charts import Colors, curves_of
from trustbatch.studies.comparisons import (
    Contender,
    Outcome,
    common_label,
    holm,
    mean_interval,
    t_probability,
    t_quantile,
    table_rows,
)
from trustbatch.studies.comparisons import PairedDifference as Difference
from trustbatch.studies.curves import all_runs_csv, paper_csv, reward_points
from trustbatch.studies.page import hardware, write_csv, write_study_page
from trustbatch.studies.results import (
    FINAL_REWARD,
    REWARD,
    RunState,
    StudyResults,
    StudyRun,
    read_study,
    regime_labels,
    reward_bounds,
)
from trustbatch.studies.study import Arm
from trustbatch.studies.tables import arm_columns, held_out, hyper_parameters
from trustbatch.studies.verdict import judge, verdict

EVIL = '<script>alert(1)</script></pre></title><img src=x onerror=alert(2)>"\' onload="alert(3)'


def study_of(folder: Path, *arms: Arm, seeds: int = 1, **more: Any) -> Path:
    return write_study(folder, make_study(*arms, seeds=range(seeds), **more))


def level(reward: float, steps: int = 10) -> list[float]:
    return [reward] * steps


def only_run(folder: Path, rewards: list[float], **more: Any) -> StudyRun:
    study_of(folder, P3O)
    write_run(folder, P3O, 0, rewards, **more)
    (found,) = read_study(folder).runs
    return found


# numbers of a run


def test_final_best_and_collapse_are_those_of_windows(tmp_path: Path) -> None:
    # 20 steps: windows of 5; those that end at step 10 + j hold j times 0.28: 0.8 - 0.104 j,
    # which is below 0.4 from j = 4 on
    run = only_run(tmp_path, level(0.8) + level(0.28))
    assert run.window == 5
    assert run.final_reward == pytest.approx(0.28)
    assert run.best_reward == pytest.approx(0.8)
    assert run.collapse_step == 14


def test_a_tenth_of_many_steps_is_averaged(tmp_path: Path) -> None:
    run = only_run(tmp_path, level(0.0, 72) + level(0.4, 4) + level(0.6, 4))
    assert run.window == 8
    assert run.final_reward == pytest.approx(0.5)
    assert run.best_reward == pytest.approx(0.5)


def test_a_reward_that_comes_back_has_not_collapsed(tmp_path: Path) -> None:
    run = only_run(tmp_path, level(0.8) + level(0.1) + level(0.4))
    assert run.collapse_step is None


def test_the_collapse_counted_is_the_one_that_lasted(tmp_path: Path) -> None:
    # 40 steps: down, up again, and down: at step 30 + j the mean is 0.8 - 0.16 j, below 0.4 at j=3
    run = only_run(tmp_path, level(0.8) + level(0.0) + level(0.8) + level(0.0))
    assert run.collapse_step == 33


def test_a_reward_that_never_rose_can_not_collapse(tmp_path: Path) -> None:
    assert only_run(tmp_path, level(0.04) + level(0.0)).collapse_step is None


def test_a_run_without_all_steps_has_no_final_reward(tmp_path: Path) -> None:
    run = only_run(tmp_path, level(0.8) + level(0.2), steps=30)
    assert (run.final_reward, run.best_reward) == (None, None)
    assert run.collapse_step == 14


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = only_run(tmp_path, [math.nan, *level(0.5), math.inf])
    assert run.final_reward == pytest.approx(0.5)


def test_distrust_is_the_highest_window(tmp_path: Path) -> None:
    metrics = {"one_minus_ess": level(0.1, 5) + level(0.3, 5) + level(0.2, 10)}
    run = only_run(tmp_path, level(0.5, 20), metrics=metrics)
    assert run.peak_distrust == pytest.approx(0.3)
    assert run.final_distrust == pytest.approx(0.2)


# the state of a study


def test_every_arm_and_seed_has_a_state(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO, seeds=2)
    write_run(tmp_path, P3O, 0, level(0.5), held_out=(0.5, 0.4, 0.6))
    write_run(tmp_path, P3O, 1, level(0.5), steps=30)
    write_run(tmp_path, DAPO, 0, level(0.5), steps=30, failure="Out of memory.")
    results = read_study(tmp_path)
    states = {(run.arm.name, run.seed): run.state for run in results.runs}
    assert states == {
        ("p3o", 0): RunState.FINISHED,
        ("p3o", 1): RunState.UNFINISHED,
        ("dapo", 0): RunState.FAILED,
        ("dapo", 1): RunState.MISSING,
    }
    assert results.runs[0].held_out_mean == 0.5
    assert (results.runs[1].steps_done, results.runs[1].steps_planned) == (10, 30)
    assert results.runs[2].error == "Out of memory."


def test_a_run_that_failed_before_its_first_step_is_failed(tmp_path: Path) -> None:
    study_of(tmp_path, P3O)
    folder = tmp_path / "runs" / "p3o--seed-0"
    folder.mkdir(parents=True)
    (folder / "failure.json").write_text('{"error": "No such model.", "traceback": ""}')
    (run,) = read_study(tmp_path).runs
    assert (run.state, run.error, run.steps_done) == (RunState.FAILED, "No such model.", 0)


def test_a_trained_run_is_finished_once_it_is_evaluated(tmp_path: Path) -> None:
    study_of(tmp_path, P3O)
    tree = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(tree | {"held_out": {"num_prompts": 8}}))
    folder = write_run(tmp_path, P3O, 0, level(0.5))
    assert read_study(tmp_path).runs[0].state is RunState.UNFINISHED
    (folder / "evaluation.json").write_text('{"mean_reward": 0.5, "low": 0.4, "high": 0.6}')
    assert read_study(tmp_path).runs[0].state is RunState.FINISHED


def test_damaged_files_are_named_and_stop_nothing(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO)
    folder = write_run(tmp_path, P3O, 0, level(0.5))
    (folder / "evaluation.json").write_text("{")
    write_evaluation(tmp_path, DAPO, 0, {"amc": [1, 2]})
    (tmp_path / "evaluations" / "dapo--seed-0" / "results.json").write_text("[]")
    runs = read_study(tmp_path).runs
    assert runs[0].problems == ("unreadable evaluation.json", "evaluation.json has no mean_reward")
    assert "results.json can't be read" in runs[1].problems[0]
    assert "unreadable evaluation.json" in write_study_page(tmp_path).read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"arms": [], "seeds": []}'])
def test_an_unreadable_study_is_one_sentence(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"has no study\.json"):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(ConfigError, match=r"study\.json"):
        read_study(tmp_path)


def test_names_and_labels_without_the_regime() -> None:
    arms = crossed({"t0.6": "T = 0.6", "t1.2": "T = 1.2"}, [P3O, GRPO[1]])
    assert [arm.plain_name for arm in arms] == ["p3o", "grpo-0.4"] * 2
    assert regime_labels(arms) == {"t0.6": "T = 0.6", "t1.2": "T = 1.2"}
    assert regime_labels(arms[:1]) == {"t0.6": "t0.6"}
    assert regime_labels([P3O, DAPO]) == {"": ""}


def test_an_arm_without_a_regime_belongs_to_all(tmp_path: Path) -> None:
    base = Arm(name="base", label="Base model", changes={})
    arms = crossed({"t0.6": "T = 0.6", "t1.2": "T = 1.2"}, [P3O])
    results = read_study(study_of(tmp_path, base, *arms))
    assert results.regimes == {"t0.6": "t0.6", "t1.2": "t1.2"}
    assert [arm.label for arm in results.in_regime("t1.2")] == ["Base model", "P3O, T = 1.2"]
    assert [arm.regime for arm in results.in_regime("t1.2")] == ["t1.2", "t1.2"]


# statistics


def test_students_t_has_the_values_of_printed_tables() -> None:
    for degrees, quantile in ((1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)):
        assert t_quantile(0.95, degrees) == pytest.approx(quantile, abs=1e-4)
        assert t_probability(-quantile, degrees) == pytest.approx(0.05, abs=1e-5)
    assert t_probability(0.0, 4) == 1.0
    assert t_probability(math.inf, 4) == 0.0
    assert t_probability(3.0, 1) == pytest.approx(1 - 2 * math.atan(3.0) / math.pi)


def test_the_interval_of_three_differences() -> None:
    # deviation 0.1, so the error is 0.1 / sqrt(3), t = 2 sqrt(3), and with 2 degrees of freedom
    # p = 1 - t / sqrt(t^2 + 2)
    value, low, high, p_value = mean_interval([0.1, 0.2, 0.3])
    reach = 4.302653 * 0.1 / math.sqrt(3)
    assert (value, low, high) == pytest.approx((0.2, 0.2 - reach, 0.2 + reach), abs=1e-6)
    assert p_value == pytest.approx(1 - math.sqrt(12 / 14))


def test_intervals_of_differences_that_do_not_vary() -> None:
    assert mean_interval([0.0, 0.0]) == (0.0, 0.0, 0.0, 1.0)
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5, 0.5, 0.5)  # no spread: as a sign test has it
    assert mean_interval([0.1 + 0.2, 0.3, 0.3])[3] == 0.25  # rounding is no spread either
    value, low, _, p_value = mean_interval([0.5])
    assert (value, p_value) == (0.5, 1.0)
    assert math.isnan(low)


def test_holm_multiplies_the_smallest_most(tmp_path: Path) -> None:
    study_of(tmp_path, P3O)
    (arm,) = read_study(tmp_path).arms
    each = Contender.of(arm)
    sides = {"first": each, "second": each, "value": 0.1, "low": 0.0, "high": 0.2}
    found = holm(
        [
            Difference(**sides, p_value=p, num_pairs=5, num_better=5, num_worse=0)
            for p in (0.04, 0.01, 0.03)
        ]
    )
    # in order 0.01 * 3, 0.03 * 2, and 0.04 * 1, which may not fall below the 0.06 before it
    assert [each.adjusted_p for each in found] == pytest.approx([0.06, 0.03, 0.06])
    assert [each.outcome for each in found] == [Outcome.UNCLEAR, Outcome.BETTER, Outcome.UNCLEAR]


def test_what_a_family_is_called() -> None:
    assert common_label(["GRPO, clip 0.2", "GRPO, clip 0.4"]) == "GRPO"
    assert common_label(["k3", "no KL"]) == "k3 / no KL"


def test_an_objective_needs_its_own_numbers() -> None:
    assert hyper_parameters("p3o") == []
    assert hyper_parameters("grpo") == ["clip_low", "clip_high"]
    assert hyper_parameters("cispo") == ["clip_high"]
    assert hyper_parameters("decoupled") == ["clip_low", "clip_high", "weight_cap"]
    assert hyper_parameters("grpo_is") == ["clip_low", "clip_high", "correction_cap"]
    assert hyper_parameters("m2po") == ["threshold"]
    assert hyper_parameters("unknown") is None


# verdicts


def two_arms(folder: Path, ours: list[float], theirs: list[float]) -> StudyResults:
    study_of(folder, P3O, DAPO, seeds=len(ours))
    for seed, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        write_run(folder, P3O, seed, level(one), metrics={"one_minus_ess": level(0.001)})
        write_run(folder, DAPO, seed, level(other), metrics={"one_minus_ess": level(0.002)})
    return read_study(folder)


def test_a_clear_difference_is_said_with_its_interval(tmp_path: Path) -> None:
    found = judge(two_arms(tmp_path, [0.7, 0.8, 0.9], [0.4, 0.5, 0.62]))
    # differences 0.3, 0.3, 0.28: mean 0.29333, deviation 0.011547, reach 4.302653 * that / sqrt(3)
    assert found.sentences[0] == (
        "P3O is better than DAPO (+0.293, +0.265 to +0.322, higher with 3 of 3 seeds): differences "
        "in final reward with 95% intervals, paired over 3 seeds."
    )
    assert found.sentences[1] == (
        "1-ESS rose to 0.001 with P3O and at its highest to 0.002, with DAPO: this data was nearly "
        "on-policy, where objectives have little to differ in."
    )
    assert found.remarks == ()


def test_the_worse_arm_is_called_worse(tmp_path: Path) -> None:
    found = judge(two_arms(tmp_path, [0.4, 0.5, 0.62], [0.7, 0.8, 0.9]))
    assert found.sentences[0].startswith(
        "P3O is worse than DAPO (\N{MINUS SIGN}0.293, \N{MINUS SIGN}0.322 to \N{MINUS SIGN}0.265, "
        "lower with 3 of 3 seeds)"
    )


def test_what_varies_too_much_can_not_be_told(tmp_path: Path) -> None:
    found = judge(two_arms(tmp_path, [0.5, 0.6, 0.7], [0.4, 0.4, 0.4]))
    assert found.sentences[0].startswith("P3O can't be told from DAPO (+0.200, \N{MINUS SIGN}0.048")


def test_one_seed_tells_nothing_over_seeds(tmp_path: Path) -> None:
    found = judge(two_arms(tmp_path, [0.7], [0.4]))
    assert found.sentences[0] == (
        "With one seed it can't be told which arm is better: P3O differs in final reward from DAPO "
        "by +0.300."
    )


def test_nothing_is_said_of_nothing(tmp_path: Path) -> None:
    results = read_study(study_of(tmp_path, P3O, DAPO))
    found = judge(results)
    assert found.sentences[0].startswith("Nothing can be said yet")
    assert found.sentences[1].startswith("1-ESS was not recorded")
    assert found.remarks == ("Not run: P3O and DAPO.",)


def test_seeds_are_paired_and_failures_named(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO, seeds=3)
    for seed, reward in enumerate((0.5, 0.6, 0.9)):
        write_run(tmp_path, P3O, seed, level(reward))
    write_run(tmp_path, DAPO, 0, level(0.4))
    write_run(tmp_path, DAPO, 1, level(0.498))
    write_run(tmp_path, DAPO, 2, level(0.5, 7), steps=10, failure="The gradient is not finite.")
    found = judge(read_study(tmp_path))
    # the third seed has no partner; the others differ by 0.1 and 0.102
    assert found.sentences[0].startswith("P3O is better than DAPO (+0.101, +0.088 to +0.114")
    assert "paired over 2 seeds" in found.sentences[0]
    assert found.remarks == (
        "DAPO failed with seed 2 (of 3); what it did not finish is not in the numbers.",
    )


def test_a_family_is_compared_by_its_mean(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, *GRPO, seeds=2)
    for seed in range(2):
        write_run(tmp_path, P3O, seed, level(0.6 + 0.1 * seed))
        for arm, reward in zip(GRPO, (0.2, 0.4, 0.6), strict=True):
            write_run(tmp_path, arm, seed, level(reward + 0.1 * seed))
    results = read_study(tmp_path)
    found = judge(results)
    (only,) = found.differences
    assert only.second.label == "GRPO (mean of 3)"
    assert only.value == pytest.approx(0.2)
    # over seeds each clip has 0.05 more than with the first
    assert found.remarks == (
        "GRPO over its 3 settings: mean final reward 0.450, deviation 0.200, from 0.250 "
        "(GRPO, clip 0.2) to 0.650 (GRPO, clip 0.6).",
    )
    assert "collapsed" not in " ".join(found.remarks)


def test_a_collapse_is_named_with_its_step(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO)
    write_run(tmp_path, P3O, 0, level(0.8, 20))
    write_run(tmp_path, DAPO, 0, level(0.8) + level(0.2))
    assert judge(read_study(tmp_path)).remarks == (
        "DAPO collapsed with its only seed, at step 14.",
    )


def test_several_regimes_are_compared_each_within_itself(tmp_path: Path) -> None:
    arms = crossed({"lag2": "lag 2", "lag8": "lag 8"}, [P3O, DAPO])
    study_of(tmp_path, *arms, seeds=3)
    rewards = {"lag2-p3o": 0.5, "lag2-dapo": 0.5, "lag8-p3o": 0.4, "lag8-dapo": 0.1}
    for arm in arms:
        for seed, luck in enumerate((0.0, 0.01, 0.03)):
            more = luck if arm.name.endswith("p3o") else 0.015
            distrust = {"one_minus_ess": level(0.02 if arm.regime == "lag2" else 0.2)}
            write_run(tmp_path, arm, seed, level(rewards[arm.name] + more), metrics=distrust)
    found = judge(read_study(tmp_path))
    assert [each.first.regime_label for each in found.differences] == ["lag 2", "lag 8"]
    assert found.sentences == (
        "Of 2 comparisons in 2 regimes, P3O is clearly better in 1 (lag 8: DAPO by +0.298, +0.260 "
        "to +0.336) and clearly worse in 0, and 1 can't be told: differences in final reward with "
        "95% intervals, paired over seeds.",
        "1-ESS of P3O rose to between 0.02 (lag 2) and 0.2 (lag 8) (highest mean over a tenth of "
        "the steps).",
    )
    # seed by seed 0.135, 0.145, 0.165: deviation 0.015275, reach 4.302653 * that / sqrt(3)
    assert found.remarks[0] == (
        "Mean over the 2 regimes: P3O is better than DAPO (+0.148, +0.110 to +0.186, higher with 3 "
        "of 3 seeds): differences in final reward with 95% intervals, paired over 3 seeds."
    )
    assert found.regimes["lag2"].sentences[0].startswith("P3O can't be told from DAPO")
    assert "2 comparisons were made" in found.remarks[-1]
    assert found.remarks[-1].endswith(
        "Taken one at a time, as the intervals are, 1 would be clear."
    )


def test_without_a_subject_the_best_arm_is_compared_with_all(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO, GSPO, seeds=2, subject="none of them")
    for arm, rewards in ((P3O, (0.4, 0.4)), (DAPO, (0.7, 0.702)), (GSPO, (0.5, 0.5))):
        for seed, reward in enumerate(rewards):
            write_run(tmp_path, arm, seed, level(reward))
    found = judge(read_study(tmp_path))
    assert len(found.differences) == 3
    assert found.sentences[0].startswith("DAPO is better than P3O (+0.301")
    assert "and GSPO (+0.201" in found.sentences[0]


def test_held_out_reward_decides_where_it_was_measured(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO, seeds=2)
    for seed, reward in enumerate((0.5, 0.502)):
        write_run(tmp_path, P3O, seed, level(0.9), held_out=(0.3, 0.2, 0.4))
        write_run(tmp_path, DAPO, seed, level(0.1), held_out=(reward, 0.4, 0.6))
    assert verdict(tmp_path).startswith("P3O is worse than DAPO (\N{MINUS SIGN}0.201")


def test_one_seed_of_benchmarks_is_compared_over_problems(tmp_path: Path) -> None:
    benchmark_study(tmp_path)
    found = judge(read_study(tmp_path))
    assert [each.unit for each in found.differences] == ["problem"] * 4
    assert "paired over 90 problems" in found.sentences[0]
    assert found.sentences[1].startswith("pass@8 is 0.600 with Base model, 0.911 with P3O")


# curves


def test_curves_have_the_columns_of_the_paper(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, *GRPO, seeds=2, paper_columns=PAPER_COLUMNS)
    for seed in range(2):
        write_run(tmp_path, P3O, seed, [0.25 + 0.5 * seed, 0.5])
        for arm, reward in zip(GRPO, (0.25, 0.5, 0.75), strict=True):
            write_run(tmp_path, arm, seed, [reward, 0.5])
    files = write_csv(tmp_path)
    assert [file.name for file in files] == ["all_runs.csv", "clip.csv"]
    assert files[1].read_text() == "step,p3o,grpo_mean,grpo_std\n1,0.5,0.5,0.25\n2,0.5,0.5,0.0\n"
    results = read_study(tmp_path)
    mean = paper_csv(results.in_regime(""), {"p": "p3o:std", "no": "x"}, "step", reward_points)
    assert mean.splitlines()[0] == "step,p"
    assert mean.splitlines()[1].startswith("1,0.35355")  # of 0.25 and 0.75


def test_every_step_of_every_run_is_a_line(tmp_path: Path) -> None:
    arms = crossed({"lag2": "lag 2", "lag8": "lag 8"}, [P3O])
    study_of(tmp_path, *arms, seeds=2, paper_columns={"ours": "p3o"})
    metrics = {"one_minus_ess": [0.125], "weight/cap": [0.875], "entropy": [1.5]}
    write_run(tmp_path, arms[0], 1, [0.5], metrics=metrics)
    write_run(tmp_path, arms[1], 0, [0.75])
    assert all_runs_csv(read_study(tmp_path)) == (
        "arm,regime,seed,step,reward,one_minus_ess,cap,entropy\n"
        "lag2-p3o,lag2,1,1,0.5,0.125,0.875,1.5\n"
        "lag8-p3o,lag8,0,1,0.75,,,\n"
    )
    names = [file.name for file in write_csv(tmp_path)]
    assert names == ["all_runs.csv", "clip-lag2.csv", "clip-lag8.csv"]
    assert (tmp_path / "curves" / "clip-lag8.csv").read_text() == "step,ours\n1,0.75\n"


def test_pass_at_k_has_a_file_of_its_own(tmp_path: Path) -> None:
    columns = {"baseline_4k": "base", "p3o": "p3o"}
    base = Arm(name="base", label="Base model", changes={})
    study_of(tmp_path, base, P3O, name="benchmarks", paper_columns=columns)
    # one of two right: pass@1 is 1/2 and pass@2 is 1; none right: 0
    write_evaluation(tmp_path, base, 0, {"amc": [0, 1]}, samples=2)
    write_evaluation(tmp_path, P3O, 0, {"amc": [1, 1]}, samples=2)
    write_csv(tmp_path)
    content = (tmp_path / "curves" / "benchmarks-pass-at-k.csv").read_text()
    assert content == "k,baseline_4k,p3o\n1,0.25,0.5\n2,0.5,1.0\n"


def test_a_family_spreads_over_its_members_on_benchmarks_too(tmp_path: Path) -> None:
    study_of(tmp_path, *GRPO, seeds=2, name="benchmarks")
    for arm, correct in zip(GRPO, (2, 4, 6), strict=True):
        for seed in range(2):
            write_evaluation(tmp_path, arm, seed, {"amc": [correct + seed]}, samples=10)
    (family, first, *_) = table_rows(read_study(tmp_path).in_regime(""))
    found = {column.heading: column.cells for column in arm_columns([family, first])}
    assert found["amc: pass@1"] == [
        "0.450 \N{PLUS-MINUS SIGN} 0.200",
        "0.250 \N{PLUS-MINUS SIGN} 0.071",
    ]


def test_bands_stay_within_bounded_rewards(tmp_path: Path) -> None:
    study_of(tmp_path / "bounded", P3O, seeds=2)
    study_of(tmp_path / "free", P3O, seeds=2)
    for folder, rewards in (("bounded", (0.4, 1.0)), ("free", (0.4, 1.2))):
        for seed, reward in enumerate(rewards):
            write_run(tmp_path / folder, P3O, seed, level(reward))
    found = {}
    for folder in ("bounded", "free"):
        results = read_study(tmp_path / folder)
        rivals = map(Contender.of, results.in_regime(""))
        (curve,) = curves_of(rivals, Colors.of(results), REWARD, reward_bounds(results.runs))
        ((low, high),) = curve.bands
        found[folder] = (low[0], high[0])
    # of 0.4 and 1.0 the mean is 0.7 and the deviation 0.6 / sqrt(2) = 0.424; of 0.4 and 1.2 it is
    # 0.8 and 0.566
    assert found["bounded"] == pytest.approx((0.276, 1.0), abs=1e-3)
    assert found["free"] == pytest.approx((0.234, 1.366), abs=1e-3)


def test_intervals_of_held_out_rewards_stay_in_bounds(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO, seeds=2)
    for seed, reward in enumerate((0.9, 0.98)):
        write_run(tmp_path, P3O, seed, level(0.5), held_out=(reward, 0.8, 1.0))
    write_run(tmp_path, DAPO, 0, level(0.5), held_out=(0.97, 0.93, 1.01))
    first, second = map(Contender.of, read_study(tmp_path).in_regime(""))
    # 0.94 with a reach of 12.7062 * 0.04: from 0.43 to beyond 1
    assert held_out(first) == "0.940 (0.432 to 1.000)"
    assert held_out(second) == "0.970 (0.930 to 1.000)"


# the summary


def test_the_summary_is_a_table_with_the_verdict(tmp_path: Path) -> None:
    two_arms(tmp_path, [0.7, 0.8], [0.4, 0.498])
    write_study_page(tmp_path)
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert lines[0] == "Which is better?"
    assert lines[2] == "    trustbatch study clip --scale cpu"
    assert lines[4:8] == [
        "| Arm | Runs finished | Final reward | Best reward | Final 1-ESS | Highest 1-ESS |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| P3O | 2 of 2 | 0.750 ± 0.071 | 0.750 ± 0.071 | 0.001 | 0.001 |",
        "| DAPO | 2 of 2 | 0.449 ± 0.069 | 0.449 ± 0.069 | 0.002 | 0.002 |",
    ]
    assert lines[11].startswith("**P3O is better than DAPO (+0.301")


def test_hardware_in_a_few_words() -> None:
    assert hardware({"gpus": ["H200", "H200"], "cpu_cores": 16}) == "2 x H200, 16 CPU cores"
    assert hardware({"gpus": [], "cpu_cores": 2}) == "2 CPU cores"
    assert hardware({}) == "\N{EN DASH}"


# the page


def evil_study(folder: Path) -> Path:
    """Every text that a study or a model can put on the page tries to run as a script."""
    arms = [
        Arm(
            name=f"{regime}-{name}",
            label=f"{EVIL} {name}, {EVIL} {regime}",
            regime=regime,
            changes={"objective.name": "p3o", f"note.{EVIL}": EVIL},
        )
        for regime in ("a", "b")
        for name in ("p3o", "other")
    ]
    study = make_study(*arms, seeds=(0, 1), title=EVIL, question=EVIL, scale=EVIL)
    write_study(folder, study)
    sample = SAMPLE | {"prompt": EVIL, "completion": EVIL, "answer": EVIL, "policy": EVIL}
    for arm in arms:
        plain = Arm(name=arm.name, label="", changes={"objective.name": "p3o"})
        metrics = {"one_minus_ess": level(0.1), "weight/cap": level(0.9), "entropy": level(2.0)}
        write_run(folder, plain, 0, level(0.5), metrics=metrics, samples=[sample])
        write_run(folder, plain, 1, level(0.5, 4), steps=9, failure=EVIL)
    for seed in range(2):
        write_evaluation(folder, arms[0], seed, {EVIL: [1, 2, 3]})
    tree = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(tree | {"command": EVIL}))
    return folder


def test_no_text_of_a_study_becomes_markup(tmp_path: Path) -> None:
    page = write_study_page(evil_study(tmp_path)).read_text()
    data = page.count('<script type="application/json"')
    assert page.count("<script") == page.count("</script>") == data + 1
    assert "<img" not in page
    assert page.count("alert(1)") > 20
    summary = (tmp_path / "summary.md").read_text().splitlines()
    # the command is a block of code, where Markdown knows no HTML
    assert [line for line in summary if "<script" in line] == [f"    {EVIL}"]


def test_failed_arms_are_on_the_page(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, DAPO)
    write_run(tmp_path, P3O, 0, level(0.5))
    write_run(tmp_path, DAPO, 0, level(0.5, 3), steps=10, failure="Out of memory at step 4.")
    page = write_study_page(tmp_path).read_text()
    assert "DAPO, seed 0 failed" in page
    assert "Out of memory at step 4." in page
    assert "failed, 3 of 10 steps" in page


def test_a_study_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    page = write_study_page(study_of(tmp_path, P3O, DAPO)).read_text()
    assert "Nothing can be said yet" in page
    assert page.count("missing") >= 2


DRAWN = """[...document.querySelectorAll('svg.chart')].map(chart => {
  const box = chart.getBoundingClientRect();
  const lines = [...chart.querySelectorAll('path.line')].map(l => l.getBoundingClientRect());
  return box.width > 100 && box.height > 100 && lines.length > 0 && lines.every(
    line => line.width > 20 && line.left >= box.left && line.right <= box.right + 1
      && line.top >= box.top && line.bottom <= box.bottom);
})"""

TWO_THIRDS = """(() => {
  const chart = document.querySelector('svg.chart'), box = chart.getBoundingClientRect();
  const line = chart.querySelector('.grid');
  const [left, right] = ['x1', 'x2'].map(end => Number(line.getAttribute(end)));
  return [box.left + left + (right - left) * 2 / 3, box.top + box.height / 2];
})()"""
"""a place two thirds along the horizontal axis of the first chart"""


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_pages_in_a_browser(tmp_path: Path) -> None:
    clip = write_study_page(clip_study(tmp_path / "clip", seeds=(1, 3)))
    benchmarks = write_study_page(benchmark_study(tmp_path / "benchmarks"))
    evil = write_study_page(evil_study(tmp_path / "evil"))
    with chromium(tmp_path / "profile") as page:
        # reward together and apart, 1-ESS, cap; three benchmarks and their average; the evil one
        # has reward, 1-ESS, cap and entropy in two regimes, and a benchmark
        for file, num_charts in ((clip, 4), (benchmarks, 4), (evil, 9)):
            for width in (420, 1300):
                page.load(file, width=width)
                page.wait_for("!Charts.isBusy()")
                drawn = page.evaluate(DRAWN)
                assert drawn == [True] * num_charts, (file, width)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.dialogs == []
        assert page.complaints == []
        assert set(page.requests) == {file.as_uri() for file in (clip, benchmarks, evil)}

        page.load(clip)
        page.wait_for("!Charts.isBusy()")
        shown = page.evaluate("document.body.innerText")
        assert "GRPO, clip 0.6, seed 1 failed" in shown
        assert "The gradient of step 24 is not finite" in shown
        # values under the pointer, and a legend that switches a curve off everywhere
        page.point_at(*page.evaluate(TWO_THIRDS))
        tip = page.evaluate("document.querySelector('.tip').innerText")
        assert tip.startswith("step ")
        assert "P3O" in tip
        count = "document.querySelectorAll('path.line').length"
        before = page.evaluate(count)
        page.evaluate("document.querySelector('.legend li').click()")
        page.wait_for("!Charts.isBusy()")
        assert page.evaluate(count) <= before - 4
        # pass@k has a logarithmic axis: of 1 to 8, 4 lies two thirds along
        page.load(benchmarks, dark=True)
        page.wait_for("!Charts.isBusy()")
        page.point_at(*page.evaluate(TWO_THIRDS))
        assert page.evaluate("document.querySelector('.tip').innerText").startswith("k 4")
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(18, 21, 26)"


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
def test_the_browser_hears_a_page_that_misbehaves(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<img src='http://192.0.2.1/x.png'><script>alert('hello'); console.error('oh');"
        "setTimeout(() => document.title = 'done'); nothing.here</script>"
    )
    with chromium(tmp_path / "profile") as page:
        page.load(bad)
        assert page.dialogs == ["hello"]
        assert any("oh" in each for each in page.complaints)
        assert any("nothing is not defined" in each for each in page.complaints)
        assert "http://192.0.2.1/x.png" in page.requests


def test_final_reward_is_a_measure(tmp_path: Path) -> None:
    study_of(tmp_path, P3O, seeds=2)
    write_run(tmp_path, P3O, 1, level(0.5))
    (arm,) = read_study(tmp_path).arms
    assert arm.by_seed(FINAL_REWARD) == {1: pytest.approx(0.5)}
