"""pass@k, confidence intervals of means, and paired significance tests.

Intervals resample the problems: an evaluation asks how a model does on problems *like* these, and
the samples of a resampled problem come with it. The plain bootstrap is overconfident if most
problems have equal scores: thirty failed problems would give an interval of zero width. So two
pseudo-problems are added, one always solved and one never (as Agresti and Coull do for
proportions). With 30 problems, the coverage of the 95% interval is then 95 to 98%, where plain
percentiles drop to 82%; `tests/evaluation/test_intervals.py` measures it.

Paired differences use the sign-flip test. If two models are equally good, a problem's difference
has either sign with equal probability, so the mean difference is compared with those of other
signs. The interval contains the shifts of all differences that the test does not reject; its ends
are means over subsets of the problems (Hartigan's typical values). Test and interval use the same
subsets, which include their complements, so the interval excludes 0 exactly if the p-value is at
most 1 - level. Ties carry no information in such a test: if no problem got worse, its lower end
would be at most 0. That end is instead extended by the rate of worse problems that is still
consistent with having seen none.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
NUM_RESAMPLES = 10_000
MAX_EXACT_DIFFERENCES = 14
"""up to this number of differences, all signs are enumerated"""
NUM_FLIPS = 10_000
"""random sign vectors if there are more"""
_RESAMPLES_IN_MEMORY = 500_000
_ROUNDING = 1e-12

Floats = NDArray[np.float64]


@lru_cache(maxsize=4096)
def pass_at_k_curve(num_samples: int, num_correct: int) -> tuple[float, ...]:
    """Return 1 - C(n - c, k) / C(n, k) for k = 1..n, the unbiased estimate of pass@k.

    pass@k is the probability that at least one of k samples is correct. The binomials are exact
    integers, and only the final division rounds.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples can't be correct.")
    curve = []
    subsets = subsets_of_wrong = 1
    num_wrong = num_samples - num_correct
    for k in range(1, num_samples + 1):
        subsets = subsets * (num_samples - k + 1) // k
        subsets_of_wrong = subsets_of_wrong * max(num_wrong - k + 1, 0) // k
        curve.append((subsets - subsets_of_wrong) / subsets)
    return tuple(curve)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the estimate for one k from 1 to `num_samples`."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} can't be estimated from {num_samples} samples.")
    return pass_at_k_curve(num_samples, num_correct)[k - 1]


def shown_ks(num_samples: int) -> list[int]:
    """Return the values of k to show: powers of two, and the number of samples."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]


def mean_intervals(
    benchmarks: Sequence[Floats],
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Floats:
    """Return the intervals [K, 2] of K scores, each a mean over benchmarks of means over problems.

    A benchmark is [problems, K] with scores from 0 to 1; NaN where a problem has none. Problems are
    resampled within each benchmark, all K scores of a problem together.
    """
    generator = np.random.default_rng(seed)
    totals = sum(_resampled_means(scores, num_resamples, generator) for scores in benchmarks)
    tail = (1.0 - level) / 2
    low, high = np.nanquantile(totals / len(benchmarks), [tail, 1.0 - tail], axis=0)
    # the pseudo-problems shift the interval to the middle: extend it to the measured value
    value = np.mean([np.nanmean(scores, axis=0) for scores in benchmarks], axis=0)
    return np.stack([np.minimum(low, value), np.maximum(high, value)], axis=-1)


def _resampled_means(scores: Floats, num_resamples: int, generator: np.random.Generator) -> Floats:
    """Return means [resamples, K] over problems sampled with replacement."""
    num_scores = scores.shape[1]
    scores = np.concatenate([scores, np.zeros((1, num_scores)), np.ones((1, num_scores))])
    is_known = ~np.isnan(scores)
    known = np.where(is_known, scores, 0.0)
    num_problems = len(scores)
    rows = max(_RESAMPLES_IN_MEMORY // num_problems, 1)
    means = np.empty((num_resamples, num_scores))
    for start in range(0, num_resamples, rows):
        part = means[start : start + rows]
        sampled = generator.integers(num_problems, size=(len(part), num_problems))
        sampled += np.arange(len(part))[:, None] * num_problems
        counts = np.bincount(sampled.ravel(), minlength=len(part) * num_problems)
        counts = counts.reshape(len(part), num_problems).astype(np.float64)
        with np.errstate(invalid="ignore"):  # NaN for a resample without any known score
            part[:] = (counts @ known) / (counts @ is_known)
    return means


def flip_p_value(
    differences: Floats, weights: Floats, *, num_flips: int = NUM_FLIPS, seed: int = 0
) -> float:
    """Return the two-sided p-value of a weighted sum of differences against a mean of zero."""
    terms = differences * weights
    signs = 1.0 - 2.0 * _subsets(len(terms), num_flips, seed)
    sums = np.abs(signs @ terms)
    reached = np.abs(terms.sum()) - _ROUNDING * np.abs(terms).sum()
    return float((sums >= reached).mean())


def flip_interval(
    differences: Floats,
    weights: Floats,
    *,
    level: float = LEVEL,
    num_flips: int = NUM_FLIPS,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the range of shifts that the test does not reject, within -1 and 1."""
    tail = (1.0 - level) / 2
    flipped = _subsets(len(differences), num_flips, seed)
    rank = int(np.floor(len(flipped) * tail))
    has_some = flipped.any(axis=1)
    num_beyond = rank - int((~has_some).sum())  # the empty subset counts as beyond any shift
    flipped = flipped[has_some]
    # rounded, so that an end at 0 is exactly 0
    means = np.sort(((flipped @ (differences * weights)) / (flipped @ weights)).round(12))
    low, high = -1.0, 1.0
    if num_beyond >= 0:  # with fewer problems, the test rejects nothing
        low, high = max(means[num_beyond], low), min(means[-1 - num_beyond], high)
    unseen = 1.0 - tail ** weights.max()
    if low <= 0.0 and not (differences < 0).any():
        low = -unseen
    if high >= 0.0 and not (differences > 0).any():
        high = unseen
    return float(low), float(high)


def _subsets(size: int, num_flips: int, seed: int) -> NDArray[np.float64]:
    """Return all subsets as rows of 0 and 1, or random ones including the empty one.

    Each complement is included, so that sums with flipped signs are symmetric around 0.
    """
    if size <= MAX_EXACT_DIFFERENCES:
        numbers = np.arange(2**size)
        return ((numbers[:, None] >> np.arange(size)) & 1).astype(np.float64)
    sampled = np.random.default_rng(seed).integers(2, size=(num_flips // 2, size), dtype=np.int8)
    sampled[0] = 0  # the observed signs: without them, p could be 0
    return np.concatenate([sampled, 1 - sampled]).astype(np.float64)
