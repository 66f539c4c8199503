"""Paired comparison: exact small cases, size under the null, power, coverage, refusals."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trustbatch.errors import ConfigError
from trustbatch.evaluation.comparison import compare
from trustbatch.evaluation.results import EvaluationResults, ProblemOutcome
from trustbatch.evaluation.statistics import flip_interval, flip_p_value

NUM_TRIALS = 400


def equal_weights(size: int) -> np.ndarray:
    return np.full(size, 1 / size)


def test_the_p_value_is_the_share_of_signs_that_reach_the_difference() -> None:
    differences = np.array([0.5, 0.25, -0.125, 0.0, 0.75])
    weights = np.array([0.1, 0.3, 0.2, 0.2, 0.2])
    seen = abs((differences * weights).sum())
    reached = [
        abs((np.array(signs) * differences * weights).sum()) >= seen - 1e-12
        for signs in itertools.product((1, -1), repeat=5)
    ]
    assert flip_p_value(differences, weights) == sum(reached) / 32


def test_hand_cases_of_the_p_value() -> None:
    for size in range(1, 12):  # all in one direction: only that and its mirror image reach it
        assert flip_p_value(np.ones(size), equal_weights(size)) == 2.0 ** (1 - size)
    assert flip_p_value(np.zeros(30), equal_weights(30)) == 1.0
    assert flip_p_value(np.array([0.5, -0.5]), equal_weights(2)) == 1.0
    # the signs that were seen, and their mirror image
    assert flip_p_value(np.ones(200), equal_weights(200)) == pytest.approx(2e-4)


def test_the_interval_is_what_the_test_does_not_reject() -> None:
    """By brute force: every shift is tested with all signs."""
    differences = np.random.default_rng(0).normal(0.1, 0.2, 8).clip(-1, 1)
    low, high = flip_interval(differences, equal_weights(8))
    signs = np.array(list(itertools.product((1, -1), repeat=8)))

    def is_rejected(shift: float) -> bool:
        means = signs @ (differences - shift) / 8
        one_sided = min(
            (means >= (differences - shift).mean() - 1e-12).mean(),
            (means <= (differences - shift).mean() + 1e-12).mean(),
        )
        return bool(one_sided <= 0.025)

    shifts = np.linspace(-0.5, 0.5, 2001)
    kept = [shift for shift in shifts if not is_rejected(shift)]
    assert (kept[0], kept[-1]) == pytest.approx((low, high), abs=6e-4)
    assert flip_interval(np.array([0.1, -0.2]), equal_weights(2)) == (-1.0, 1.0)


@pytest.mark.parametrize("size", [1, 4, 10, 30, 500])
def test_ties_leave_room_for_what_was_not_seen(size: int) -> None:
    """The rate of worse problems at which none of `size` is seen in 1 of 40 cases."""
    low, high = flip_interval(np.zeros(size), equal_weights(size))
    assert low == -high
    assert (1 - high) ** size == pytest.approx(0.025)
    one_better = np.zeros(size)
    one_better[0] = 0.5
    assert flip_interval(one_better, equal_weights(size))[0] == low
    assert flip_interval(-one_better, equal_weights(size))[1] == high


def test_ties_of_a_small_and_a_large_task() -> None:
    """Problems that weigh more leave more room: the worst case is all of it in the small task."""
    weights = np.concatenate([np.full(5, 0.1), np.full(50, 0.01)])
    low, high = flip_interval(np.zeros(55), weights)
    assert high > 0.5 * (1 - 0.025 ** (1 / 5))
    assert -low == high < 0.5


def test_the_interval_excludes_zero_exactly_when_the_test_is_significant() -> None:
    generator = np.random.default_rng(1)
    for size in (6, 9, 14, 15, 40):
        for _ in range(60):
            differences = generator.integers(-4, 5, size) / 16 + generator.choice([0, 0.125])
            differences[generator.random(size) < 0.3] = 0.0
            weights = equal_weights(size)
            p_value = flip_p_value(differences, weights, num_flips=1000)
            low, high = flip_interval(differences, weights, num_flips=1000)
            assert (p_value <= 0.05) == (not low <= 0 <= high), (differences, p_value, low, high)


@pytest.mark.parametrize("difficulty", [(2, 2), (0.5, 0.5), (0.2, 4)], ids=str)
def test_size_power_and_coverage_with_thirty_problems(difficulty: tuple[float, float]) -> None:
    """Two models of chances p and p ** exponent; the first pair is equally good."""
    generator = np.random.default_rng(3)
    weights = equal_weights(30)
    rejected = {}
    for exponent in (1.0, 0.7, 0.5):
        everyone = generator.beta(*difficulty, 1_000_000)
        truth = (everyone**exponent - everyone).mean()
        num_rejected = num_inside = 0
        for _ in range(NUM_TRIALS):
            chances = generator.beta(*difficulty, 30)
            first, second = (
                generator.binomial(16, each) / 16 for each in (chances, chances**exponent)
            )
            p_value = flip_p_value(second - first, weights, num_flips=1500)
            low, high = flip_interval(second - first, weights, num_flips=1500)
            num_rejected += p_value < 0.05
            num_inside += low <= truth <= high
            assert (p_value <= 0.05) == (not low <= 0 <= high)
        rejected[exponent] = num_rejected / NUM_TRIALS
        assert num_inside / NUM_TRIALS > 0.9
    assert rejected[1.0] <= 0.05 + 2.5 * (0.05 * 0.95 / NUM_TRIALS) ** 0.5
    assert rejected[0.7] < rejected[0.5]
    assert rejected[0.5] > 0.85


def test_pairing_sees_what_separate_intervals_hide() -> None:
    """Problems differ much more than the models do."""
    generator = np.random.default_rng(0)
    chances = generator.beta(0.5, 0.5, 40)
    first = results("a", [round(16 * chance) for chance in chances])
    second = results("b", [min(round(16 * chance) + 1, 16) for chance in chances])
    scores = [each.scores[0].at(1) for each in (first, second)]
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[1].low < scores[0].high
    difference = compare(first, second).differences[0]
    assert difference.is_significant
    assert difference.low > 0


def results(
    model: str,
    correct: Sequence[int],
    *,
    samples: int = 16,
    tasks: Sequence[str] = ("aime24",),
    graded: int | None = None,
    **settings: Any,
) -> EvaluationResults:
    """One model whose problems have these numbers of right samples, the same for every task."""
    outcomes = [
        ProblemOutcome(
            id=str(number),
            samples=samples,
            graded=samples if graded is None else graded,
            correct=right,
            truncated=0,
            mean_reward=None,
            mean_tokens=1.0,
        )
        for number, right in enumerate(correct)
    ]
    return EvaluationResults(
        model=model,
        settings={
            "samples": samples,
            "temperature": 1.0,
            "top_p": 0.95,
            "max_tokens": 64,
            "tasks": {task: {"problems": len(correct), "digest": "same"} for task in tasks},
            **settings,
        },
        outcomes=dict.fromkeys(tasks, outcomes),
    )


def test_the_verdict_names_the_better_model_or_none() -> None:
    weak, strong = results("weak", [0, 4, 8] * 8), results("strong", [4, 8, 16] * 8)
    assert compare(weak, strong).verdict.startswith(
        "strong is better than weak on aime24: by 0.333 in pass@1 (0."
    )
    assert compare(strong, weak).verdict.startswith(
        "strong is better than weak on aime24: by 0.333 in pass@1 (0."
    )
    same = compare(weak, weak)
    assert same.verdict == (
        "weak (first) and weak (second) do not differ on aime24: all 24 problems have the same "
        "pass@1, and the interval of the difference is -0.142 to +0.142."
    )
    assert same.differences[0].p_value == 1.0


def test_the_average_weights_all_benchmarks_equally() -> None:
    small, large = results("a", [0] * 5), results("a", [0] * 50)
    better = results("b", [16] * 5)
    first = EvaluationResults(
        model="a",
        settings=small.settings | {"tasks": {"x": 1, "y": 2}},
        outcomes={"x": small.outcomes["aime24"], "y": large.outcomes["aime24"]},
    )
    second = EvaluationResults(
        model="b",
        settings=first.settings,
        outcomes={"x": better.outcomes["aime24"], "y": large.outcomes["aime24"]},
    )
    comparison = compare(first, second)
    assert [each.task for each in comparison.differences] == ["x", "y", "average"]
    assert [each.value for each in comparison.differences] == [1.0, 0.0, 0.5]
    assert comparison.differences[-1].p_value == pytest.approx(2.0**-4, abs=0.01)
    assert [score.name for score in second.scores] == ["x", "y", "average"]
    assert second.scores[-1].pass_at_k[0].value == 0.5


def test_only_problems_that_both_models_have_graded_are_compared() -> None:
    first, second = results("a", [1, 2, 3], graded=3), results("b", [1, 2, 2], graded=2)
    assert compare(first, second, k=2).differences[0].num_problems == 3
    with pytest.raises(ConfigError, match="No problem of aime24 has 3 graded samples of both"):
        compare(first, second, k=3)
    with pytest.raises(ConfigError, match=r"pass@17 can't be compared with 16 samples"):
        compare(first, second, k=17)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 8}, "was evaluated with samples = 16 and b with 8"),
        ({"temperature": 0.6}, "temperature = 1.0 and b with 0.6: evaluate both with the same"),
        ({"top_p": 1.0}, "top_p = 0.95 and b with 1.0"),
        ({"max_tokens": 128}, "max_tokens = 64 and b with 128"),
    ],
)
def test_other_settings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compare(results("a", [1, 2]), results("b", [1, 2], **change))


def test_other_problems_are_refused() -> None:
    with pytest.raises(ConfigError, match="different problems of aime24"):
        compare(results("a", [1, 2]), results("b", [1, 2, 3]))
    with pytest.raises(ConfigError, match="on aime24 and b on amc23: evaluate both on the same"):
        compare(results("a", [1]), results("b", [1], tasks=("amc23",)))
