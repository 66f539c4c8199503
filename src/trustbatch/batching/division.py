"""Units divided into bins, one a micro-batch, evenly over the ranks.

Every rank computes the whole division, so all know the same, and takes its own part. All ranks
have the same number of bins, since each bin is a round of collective operations; a rank that has
too few gets empty ones. Bins of one round cost nearly the same, since all wait for the slowest.
"""

from collections.abc import Sequence

from trustbatch.batching.units import SharedPromptGroup

Bin = list[SharedPromptGroup]


def packed_bins(
    units: Sequence[SharedPromptGroup], *, max_tokens: int, num_ranks: int
) -> list[Bin]:
    """Fill the fewest bins of at most `max_tokens`, at equal cost where the tokens allow it.

    Units come longest first; one that is longer than a bin gets a bin of its own.
    """
    full = _first_fit(units, max_tokens)
    even = _spread(units, max_tokens, num_bins=_round_up(len(full), num_ranks))
    return even if even is not None else full


def padded_bins(units: Sequence[SharedPromptGroup], *, max_tokens: int) -> list[Bin]:
    """Put neighbors in length together, at most `max_tokens` in each bin with padding."""
    bins: list[Bin] = []
    for unit in units:
        # the first unit of a bin is its longest and sets the width
        if bins and (len(bins[-1]) + 1) * bins[-1][0].num_tokens <= max_tokens:
            bins[-1].append(unit)
        else:
            bins.append([unit])
    return bins


def bins_of_rank(bins: Sequence[Bin], *, rank: int, num_ranks: int) -> list[Bin]:
    """Deal bins in rounds of like cost, the dearest of a round to the rank that has done least."""
    empty: list[Bin] = [[] for _ in range(_round_up(len(bins), num_ranks) - len(bins))]
    ordered = sorted([*bins, *empty], key=lambda each: -_cost(each))
    done = [0.0] * num_ranks
    mine = []
    for start in range(0, len(ordered), num_ranks):
        order = sorted(range(num_ranks), key=lambda number: done[number])
        for owner, each in zip(order, ordered[start : start + num_ranks], strict=True):
            done[owner] += _cost(each)
            if owner == rank:
                mine.append(each)
    return mine


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _cost(units: Sequence[SharedPromptGroup]) -> float:
    return sum(unit.cost for unit in units)


def _first_fit(units: Sequence[SharedPromptGroup], max_tokens: int) -> list[Bin]:
    """First-fit decreasing: at most 11/9 of the fewest bins possible, and nearly always fewer."""
    bins: list[Bin] = []
    used: list[int] = []
    for unit in units:
        for number, tokens in enumerate(used):
            if tokens + unit.num_tokens <= max_tokens:
                bins[number].append(unit)
                used[number] += unit.num_tokens
                break
        else:
            bins.append([unit])
            used.append(unit.num_tokens)
    return bins


def _spread(units: Sequence[SharedPromptGroup], max_tokens: int, num_bins: int) -> list[Bin] | None:
    """Put each unit where there is least to do so far; None where one finds no room."""
    bins: list[Bin] = [[] for _ in range(num_bins)]
    used, cost = [0] * num_bins, [0.0] * num_bins
    for unit in units:
        most = max(max_tokens - unit.num_tokens, 0)
        room = [number for number in range(num_bins) if used[number] <= most]
        if not room:
            return None
        best = min(room, key=lambda number: cost[number])
        bins[best].append(unit)
        used[best] += unit.num_tokens
        cost[best] += unit.cost
    return bins
