"""pass@k: the chance that at least one of k samples is right, estimated without bias from n."""

from functools import lru_cache


@lru_cache(maxsize=4096)
def pass_at_k_curve(num_samples: int, num_correct: int) -> tuple[float, ...]:
    """Return 1 - C(n - c, k) / C(n, k) for k = 1..n: the share of k-subsets with a right sample.

    The binomials are whole numbers, and the one division is rounded once: the result is exact to
    the last bit for any n.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples can't be right.")
    curve = []
    subsets = subsets_of_wrong = 1
    num_wrong = num_samples - num_correct
    for k in range(1, num_samples + 1):
        subsets = subsets * (num_samples - k + 1) // k
        subsets_of_wrong = subsets_of_wrong * max(num_wrong - k + 1, 0) // k
        curve.append((subsets - subsets_of_wrong) / subsets)
    return tuple(curve)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the estimate for one k of at least 1 and at most `num_samples`."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} can't be estimated from {num_samples} samples.")
    return pass_at_k_curve(num_samples, num_correct)[k - 1]


def shown_ks(num_samples: int) -> list[int]:
    """Return the k of a table: powers of two, and the number of samples."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]
