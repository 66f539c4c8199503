"""Coverage of intervals, measured over many simulated evaluations."""

import numpy as np
import pytest

from trustbatch.evaluation.statistics import mean_intervals, pass_at_k

NUM_SAMPLES = 16
NUM_EVALUATIONS = 600
LIKELY = 2.5 * (0.05 * 0.95 / NUM_EVALUATIONS) ** 0.5
"""how far a coverage of 0.95 is measured off by chance"""


def evaluations(
    difficulty: tuple[float, float], k: int, num_problems: int, generator: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Scores [evaluations, problems] of problems with random difficulty, and the true score."""
    table = np.array([pass_at_k(NUM_SAMPLES, c, k) for c in range(NUM_SAMPLES + 1)])
    chances = generator.beta(*difficulty, (NUM_EVALUATIONS, num_problems))
    truth = (1 - (1 - generator.beta(*difficulty, 1_000_000)) ** k).mean()
    return table[generator.binomial(NUM_SAMPLES, chances)], float(truth)


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize(
    "difficulty", [(2, 2), (0.5, 0.5), (0.3, 1.5), (0.2, 4), (0.05, 0.5)], ids=str
)
def test_coverage_with_thirty_problems(difficulty: tuple[float, float], k: int) -> None:
    """From problems that are much alike to a few easy ones among many that always fail."""
    scores, truth = evaluations(difficulty, k, 30, np.random.default_rng(1))
    intervals = np.array([mean_intervals([s[:, None]], num_resamples=1000)[0] for s in scores])
    is_inside = (intervals[:, 0] <= truth) & (truth <= intervals[:, 1])
    assert 0.95 - LIKELY <= is_inside.mean() <= 0.975 + LIKELY
    # and it does not get there by being wide: twice as much as Student's would be of no use
    student = 2 * 2.045 * scores.std(axis=1, ddof=1).mean() / 30**0.5
    assert (intervals[:, 1] - intervals[:, 0]).mean() < 2 * student


def test_coverage_of_an_average_over_benchmarks_of_different_sizes() -> None:
    generator = np.random.default_rng(2)
    sizes = {30: (0.3, 1.5), 40: (1.0, 1.0), 120: (3.0, 1.0)}
    sampled = [evaluations(shape, 1, size, generator) for size, shape in sizes.items()]
    truth = np.mean([each for _, each in sampled])
    inside = 0
    for number in range(NUM_EVALUATIONS):
        benchmarks = [scores[number][:, None] for scores, _ in sampled]
        low, high = mean_intervals(benchmarks, num_resamples=1000)[0]
        inside += low <= truth <= high
    assert inside / NUM_EVALUATIONS == pytest.approx(0.95, abs=0.025)


def test_intervals_of_equal_scores_have_positive_width() -> None:
    (low, high), (other_low, other_high) = mean_intervals(
        [np.stack([np.zeros(30), np.ones(30)], axis=1)]
    )
    assert low == 0.0
    assert 0.05 < high < 0.15
    assert (1 - other_high, 1 - other_low) == pytest.approx((low, high), abs=0.04)
    assert mean_intervals([np.zeros((1, 1))])[0][1] > 0.9


def test_the_interval_holds_the_mean_and_shrinks_with_the_number_of_problems() -> None:
    generator = np.random.default_rng(0)
    widths = []
    for size in (20, 80, 320):
        scores = generator.random((size, 3))
        intervals = mean_intervals([scores])
        assert (intervals[:, 0] < scores.mean(axis=0)).all()
        assert (scores.mean(axis=0) < intervals[:, 1]).all()
        widths.append(float((intervals[:, 1] - intervals[:, 0]).mean()))
    assert widths[0] > 1.6 * widths[1] > 2.6 * widths[2]


def test_the_same_scores_give_the_same_interval_and_unknown_ones_do_not_count() -> None:
    scores = np.random.default_rng(0).random((40, 2))
    assert (mean_intervals([scores]) == mean_intervals([scores])).all()
    scores[:25, 1] = np.nan
    wide = mean_intervals([scores])
    assert wide[1, 1] - wide[1, 0] > 1.2 * (wide[0, 1] - wide[0, 0])
    assert wide[1, 0] < scores[25:, 1].mean() < wide[1, 1]
