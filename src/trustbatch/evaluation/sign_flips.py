"""The sign-flip test of paired differences, and the interval that goes with it.

Where two models are equally good, a problem's difference is as likely as its negative. So the mean
difference is compared with those that other signs would have given. A shift of all differences that
the test does not reject is in the interval; its ends are means over subsets of the problems
(Hartigan's typical values). Both use the same subsets, which come with their complements, so the
interval excludes 0 exactly when the p-value is at most 1 - level.

Ties say nothing to such a test: where no problem was worse, its lower end would be 0 at most. That
end is then as far below as problems that are worse can be rare enough not to have been seen.
"""

import numpy as np
from numpy.typing import NDArray

from trustbatch.evaluation.intervals import LEVEL, Floats

LARGEST_EXACT = 14
"""with up to so many differences, all signs are tried"""
NUM_FLIPS = 10_000
"""tried at random where there are more"""
_ROUNDING = 1e-12


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
    """Return the shifts that the test does not reject; -1 and 1 bound what scores can differ."""
    tail = (1.0 - level) / 2
    flipped = _subsets(len(differences), num_flips, seed)
    rank = int(np.floor(len(flipped) * tail))
    has_some = flipped.any(axis=1)
    num_beyond = rank - int((~has_some).sum())  # an empty subset is beyond any shift
    flipped = flipped[has_some]
    # rounded: an end at 0 must not fall beside it
    means = np.sort(((flipped @ (differences * weights)) / (flipped @ weights)).round(12))
    low, high = -1.0, 1.0
    if num_beyond >= 0:  # fewer problems reject nothing
        low, high = max(means[num_beyond], low), min(means[-1 - num_beyond], high)
    unseen = 1.0 - tail ** weights.max()
    if low <= 0.0 and not (differences < 0).any():
        low = -unseen
    if high >= 0.0 and not (differences > 0).any():
        high = unseen
    return float(low), float(high)


def _subsets(size: int, num_flips: int, seed: int) -> NDArray[np.float64]:
    """Return all subsets as rows of 0 and 1, or random ones beside the empty one.

    The complement of each is there too: sums with flipped signs then lie evenly around 0.
    """
    if size <= LARGEST_EXACT:
        numbers = np.arange(2**size)
        return ((numbers[:, None] >> np.arange(size)) & 1).astype(np.float64)
    sampled = np.random.default_rng(seed).integers(2, size=(num_flips // 2, size), dtype=np.int8)
    sampled[0] = 0  # the signs that were seen: without them, p could be 0
    return np.concatenate([sampled, 1 - sampled]).astype(np.float64)
