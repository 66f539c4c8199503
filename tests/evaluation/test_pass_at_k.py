"""pass@k against all subsets, exact fractions and hand cases."""

import math
from fractions import Fraction
from itertools import combinations

import pytest

from trustbatch.evaluation.statistics import pass_at_k, pass_at_k_curve, shown_ks


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (1, 1, 1, 1),
    ],
)
def test_hand_cases(num_samples: int, num_correct: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_correct, k) == expected


@pytest.mark.parametrize("num_samples", range(1, 10))
def test_it_is_the_fraction_of_subsets_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        is_right = [number < num_correct for number in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(combinations(is_right, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == share


@pytest.mark.parametrize("num_samples", [16, 1000, 4096])
def test_it_is_exact_to_the_last_bit_for_thousands_of_samples(num_samples: int) -> None:
    for num_correct in (0, 1, 7, num_samples // 2, num_samples - 1, num_samples):
        curve = pass_at_k_curve(num_samples, num_correct)
        assert len(curve) == num_samples
        for k in {1, 2, 16, num_samples // 3, num_samples}:
            fails = Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k))
            assert curve[k - 1] == float(1 - fails)


def test_what_can_not_be_estimated_is_refused() -> None:
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{k} can't be estimated from 4 samples"):
            pass_at_k(4, 2, k)
    with pytest.raises(ValueError, match="5 of 4 samples"):
        pass_at_k(4, 5, 1)


def test_the_ks_of_a_table() -> None:
    assert [shown_ks(n) for n in (1, 2, 12, 16)] == [
        [1],
        [1, 2],
        [1, 2, 4, 8, 12],
        [1, 2, 4, 8, 16],
    ]
