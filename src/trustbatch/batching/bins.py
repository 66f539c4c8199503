"""Bins: groups of sequences divided into micro-batches, evenly over the ranks.

Every rank computes the whole division, so that all ranks agree on it, and takes its own bins. All
ranks have the same number of bins, since each bin is a round of collective operations; a rank with
too few gets empty ones. The bins of one round cost nearly the same, since all ranks wait for the
slowest.
"""

from collections.abc import Sequence

from trustbatch.batching.sequences import SharedPromptGroup

Bin = list[SharedPromptGroup]


def packed_bins(
    groups: Sequence[SharedPromptGroup], *, max_tokens: int, num_ranks: int
) -> list[Bin]:
    """Fill the fewest bins of at most `max_tokens`, at equal cost where the token budget allows it.

    Groups come longest first; one that is longer than a bin gets a bin of its own.
    """
    full = _first_fit(groups, max_tokens)
    even = _spread(groups, max_tokens, num_bins=_round_up(len(full), num_ranks))
    return even if even is not None else full


def padded_bins(groups: Sequence[SharedPromptGroup], *, max_tokens: int) -> list[Bin]:
    """Put sequences of similar length together, with at most `max_tokens` per bin with padding."""
    bins: list[Bin] = []
    for group in groups:
        # the first group of a bin is its longest and sets the width
        if bins and (len(bins[-1]) + 1) * bins[-1][0].num_tokens <= max_tokens:
            bins[-1].append(group)
        else:
            bins.append([group])
    return bins


def bins_of_rank(bins: Sequence[Bin], *, rank: int, num_ranks: int) -> list[Bin]:
    """Assign bins to ranks in rounds of similar cost; returns those of one rank.

    In each round, the costliest bin goes to the least-loaded rank.
    """
    empty: list[Bin] = [[] for _ in range(_round_up(len(bins), num_ranks) - len(bins))]
    ordered = sorted([*bins, *empty], key=lambda each: -_cost(each))
    load = [0.0] * num_ranks
    own = []
    for start in range(0, len(ordered), num_ranks):
        least_loaded_first = sorted(range(num_ranks), key=lambda number: load[number])
        for owner, each in zip(least_loaded_first, ordered[start : start + num_ranks], strict=True):
            load[owner] += _cost(each)
            if owner == rank:
                own.append(each)
    return own


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _cost(groups: Sequence[SharedPromptGroup]) -> float:
    return sum(group.cost for group in groups)


def _first_fit(groups: Sequence[SharedPromptGroup], max_tokens: int) -> list[Bin]:
    """First-fit decreasing: at most 11/9 of the optimal number of bins, and usually fewer."""
    bins: list[Bin] = []
    used: list[int] = []
    for group in groups:
        for number, tokens in enumerate(used):
            if tokens + group.num_tokens <= max_tokens:
                bins[number].append(group)
                used[number] += group.num_tokens
                break
        else:
            bins.append([group])
            used.append(group.num_tokens)
    return bins


def _spread(
    groups: Sequence[SharedPromptGroup], max_tokens: int, num_bins: int
) -> list[Bin] | None:
    """Put each group into the cheapest bin so far; None where a group fits into no bin."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    used, cost = [0] * num_bins, [0.0] * num_bins
    for group in groups:
        most = max(max_tokens - group.num_tokens, 0)
        fitting = [number for number in range(num_bins) if used[number] <= most]
        if not fitting:
            return None
        best = min(fitting, key=lambda number: cost[number])
        bins[best].append(group)
        used[best] += group.num_tokens
        cost[best] += group.cost
    return bins
