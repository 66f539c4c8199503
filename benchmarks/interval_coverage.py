"""Coverage of intervals over simulated evaluations with 30 problems of 16 samples.

    python benchmarks/interval_coverage.py [--evaluations 1500] [--pairs 400]

The first table compares plain percentiles, BCa and the intervals of `trustbatch eval`; the second
is about `trustbatch compare`: how often it distinguishes equal models, and how often its
interval contains the true difference. Both are in docs/evaluation.md.
"""

import argparse
import sys
import time

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from trustbatch.evaluation.statistics import flip_interval, flip_p_value, mean_intervals, pass_at_k

NUM_PROBLEMS, NUM_SAMPLES, NUM_RESAMPLES = 30, 16, 1000
CASES = [
    ((2, 2), 1),
    ((2, 2), 8),
    ((0.5, 0.5), 1),
    ((0.3, 1.5), 1),
    ((0.2, 4), 1),
    ((0.05, 0.5), 1),
]
PAIRED = [(2, 2), (0.5, 0.5), (0.2, 4), (0.05, 0.5)]
EXPONENTS = (1.0, 0.7, 0.5)
"""a problem that one model solves with probability p, another solves with p ** exponent"""
Floats = NDArray[np.float64]


def resampled(scores: Floats, method: str) -> Floats:
    """Return intervals [evaluations, 2] of a bootstrap without pseudo-problems."""
    found = []
    for each in scores:
        if np.ptp(each) == 0:  # BCa is not defined there, and percentiles have no width
            found.append((each[0], each[0]))
            continue
        result = bootstrap(
            (each,),
            np.mean,
            axis=-1,
            vectorized=True,
            n_resamples=NUM_RESAMPLES,
            method=method,
            random_state=0,
        )
        found.append(tuple(result.confidence_interval))
    return np.array(found)


def coverage(difficulty: tuple[float, float], k: int, num_evaluations: int) -> list[float]:
    """Return the true score, and how often each kind of interval contains it."""
    generator = np.random.default_rng(1)
    table = np.array([pass_at_k(NUM_SAMPLES, c, k) for c in range(NUM_SAMPLES + 1)])
    chances = generator.beta(*difficulty, (num_evaluations, NUM_PROBLEMS))
    truth = float((1 - (1 - generator.beta(*difficulty, 1_000_000)) ** k).mean())
    scores = table[generator.binomial(NUM_SAMPLES, chances)]
    ours = np.array([mean_intervals([s[:, None]], num_resamples=NUM_RESAMPLES)[0] for s in scores])
    kinds = [resampled(scores, "percentile"), resampled(scores, "BCa"), ours]
    return [truth] + [float(((k[:, 0] <= truth) & (truth <= k[:, 1])).mean()) for k in kinds]


def paired(difficulty: tuple[float, float], exponent: float, num_pairs: int) -> tuple[float, float]:
    """Return how often two models are distinguished, and how often the interval is right."""
    generator = np.random.default_rng(3)
    weights = np.full(NUM_PROBLEMS, 1 / NUM_PROBLEMS)
    everyone = generator.beta(*difficulty, 1_000_000)
    truth = float((everyone**exponent - everyone).mean())
    apart = inside = 0
    for _ in range(num_pairs):
        chances = generator.beta(*difficulty, NUM_PROBLEMS)
        first, second = (
            generator.binomial(NUM_SAMPLES, each) / NUM_SAMPLES
            for each in (chances, chances**exponent)
        )
        apart += flip_p_value(second - first, weights, num_flips=1500) < 0.05
        low, high = flip_interval(second - first, weights, num_flips=1500)
        inside += low <= truth <= high
    return apart / num_pairs, inside / num_pairs


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=400)
    options = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}: python {' '.join(sys.argv)}\n")
    print("| difficulty | true score | percentile | BCa | with imagined problems |")
    print("|---|---|---|---|---|")
    for difficulty, k in CASES:
        truth, *held = coverage(difficulty, k, options.evaluations)
        cells = " | ".join(f"{each:.3f}" for each in held)
        print(f"| beta{difficulty}, pass@{k} | {truth:.2f} | {cells} |", flush=True)
    print("\n| difficulty | second model | told apart | interval holds the difference |")
    print("|---|---|---|---|")
    for difficulty in PAIRED:
        for exponent in EXPONENTS:
            apart, inside = paired(difficulty, exponent, options.pairs)
            second = "equal" if exponent == 1 else f"p^{exponent}"
            print(f"| beta{difficulty} | {second} | {apart:.3f} | {inside:.3f} |", flush=True)


if __name__ == "__main__":
    main()
