"""The sign-flip test of paired differences, and the interval that goes with it.

Where two models are equally good, a problem's difference is as likely as its negative. So the mean
difference is compared with those that other signs would have given. A shift of all differences that
the test does not reject is in the interval, which therefore excludes 0 exactly when the p-value is
below 1 - level; its ends are means over random subsets of the problems (Hartigan's typical values).
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
    terms = (differences * weights)[differences != 0]  # a zero stays the same under any sign
    if not len(terms):
        return 1.0
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
    flipped = _subsets(len(differences), num_flips, seed)
    rank = int(np.floor(len(flipped) * (1.0 - level) / 2))
    flipped = flipped[flipped.any(axis=1)]
    # rounded: an end at 0 must not fall beside it
    means = np.sort(((flipped @ (differences * weights)) / (flipped @ weights)).round(12))
    if rank == 0 or rank > len(means):  # so few problems reject nothing
        return -1.0, 1.0
    return float(max(means[rank - 1], -1.0)), float(min(means[-rank], 1.0))


def _subsets(size: int, num_flips: int, seed: int) -> NDArray[np.float64]:
    """Return all subsets as rows of 0 and 1, or random ones beside the empty one."""
    if size <= LARGEST_EXACT:
        numbers = np.arange(2**size)
        return ((numbers[:, None] >> np.arange(size)) & 1).astype(np.float64)
    drawn = np.random.default_rng(seed).integers(2, size=(num_flips, size), dtype=np.int8)
    drawn[0] = 0  # the signs that were seen: without them, p could be 0
    return drawn.astype(np.float64)
