"""Paired comparisons of arms, and how certain they are.

Two arms with the same seed start from the same weights and see the same prompts, so their
difference varies less than their rewards: comparisons are paired by seed. The interval is Student's
t interval of the differences; with several comparisons, a difference counts as clear only after
Holm's correction for all of them.

A family, such as GRPO over its clip ranges, is one contender: the mean of its members. Benchmarks
evaluated with a single seed are paired by problem instead, and every arm is its own contender.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from statistics import fmean, stdev

from trustbatch.evaluation.comparison import compare
from trustbatch.evaluation.statistics import LEVEL
from trustbatch.studies.results import ArmResult, Measure, Spread, StudyResults, StudyRun

ROUNDING = 1e-9
"""relative to the mean: a smaller standard error is rounding"""


class Outcome(StrEnum):
    """The result of a comparison for the first contender."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "can't be told"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An arm, or the mean of a family."""

    label: str
    members: tuple[ArmResult, ...]

    @classmethod
    def of(cls, *members: ArmResult) -> "Contender":
        """Return a contender of one arm, or of a family, labeled by what its labels share."""
        label = members[0].label
        if len(members) > 1:
            label = f"{common_label([m.label for m in members])} (mean of {len(members)})"
        return cls(label=label, members=members)

    @property
    def regime(self) -> str:
        """The regime of all members."""
        return self.members[0].regime

    @property
    def regime_label(self) -> str:
        """The label of the regime."""
        return self.members[0].regime_label

    @property
    def runs(self) -> list[StudyRun]:
        """Every member with every seed."""
        return [run for member in self.members for run in member.runs]

    def spread(self, measure: Measure) -> Spread | None:
        """Return mean and deviation: over an arm's seeds, or over several members."""
        if len(self.members) == 1:
            return self.members[0].spread(measure)
        spreads = [member.spread(measure) for member in self.members]
        return Spread.of([each.mean for each in spreads if each])

    def by_seed(self, measure: Measure) -> dict[int, float]:
        """Return the mean over members by seed, for seeds that all members have."""
        values = [member.by_seed(measure) for member in self.members]
        shared = set.intersection(*(set(each) for each in values))
        return {seed: fmean(each[seed] for each in values) for seed in sorted(shared)}

    def mean(self, measure: Measure) -> float | None:
        """Return the mean over seeds; None if no seed has a value."""
        values = self.by_seed(measure).values()
        return fmean(values) if values else None


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How much better the first contender is than the second."""

    first: Contender
    second: Contender
    value: float
    low: float
    high: float
    """ends of the 95% interval; NaN with a single pair"""
    p_value: float
    num_pairs: int
    num_better: int
    num_worse: int
    unit: str = "seed"
    """what is paired"""
    adjusted_p: float = 1.0
    """after Holm's correction for all comparisons of the study"""

    @property
    def outcome(self) -> Outcome:
        """Whether the first contender is clearly better or worse."""
        if not self.adjusted_p <= 1.0 - LEVEL:
            return Outcome.UNCLEAR
        return Outcome.BETTER if self.value > 0 else Outcome.WORSE

    @property
    def has_interval(self) -> bool:
        """Whether there were enough pairs for an interval."""
        return math.isfinite(self.low)


def contenders(arms: Sequence[ArmResult]) -> list[Contender]:
    """Return the contenders of one regime in the order of the study, each family as one."""
    groups: dict[str, list[ArmResult]] = {}
    for result in arms:
        family = result.arm.family
        groups.setdefault(f"family {family}" if family else result.arm.name, []).append(result)
    return [Contender.of(*members) for members in groups.values()]


def table_rows(arms: Sequence[ArmResult]) -> list[Contender]:
    """Return the contenders of one regime, each family followed by its members."""
    rows = []
    for each in contenders(arms):
        alone = [Contender.of(member) for member in each.members]
        rows += alone if len(alone) == 1 else [each, *alone]
    return rows


def compare_study(results: StudyResults) -> list[PairedDifference]:
    """Compare within each regime: the subject with all others, or all pairs without a subject."""
    found: list[PairedDifference] = []
    for regime in results.regimes:
        arms = results.in_regime(regime)
        if pairs := _by_problem(results, arms):
            found += pairs
            continue
        for first, second in _pairings(contenders(arms), results.subject_in(regime)):
            if difference := paired_difference(first, second, results.measure):
                found.append(difference)
    return holm(found)


def paired_difference(
    first: Contender, second: Contender, measure: Measure
) -> PairedDifference | None:
    """Compare over the seeds that both have; None if there are none."""
    by_seed = _difference_by_seed(first, second, measure)
    return _summary(first, second, list(by_seed.values())) if by_seed else None


def compare_over_regimes(results: StudyResults) -> list[PairedDifference]:
    """Compare the subject with each rival that is in every regime, by the mean over regimes.

    The mean over regimes may be clear where no single regime is.
    """
    rivals: dict[str, list[tuple[Contender, Contender]]] = {}
    for regime in results.regimes:
        subject = results.subject_in(regime)
        if subject is None:
            return []
        for first, second in _pairings(contenders(results.in_regime(regime)), subject):
            rivals.setdefault(second.label, []).append((first, second))
    found = []
    for pairs in rivals.values():
        by_seed = [_difference_by_seed(*pair, results.measure) for pair in pairs]
        shared = set.intersection(*(set(each) for each in by_seed))
        if len(pairs) == len(results.regimes) > 1 and shared:
            means = [fmean(each[seed] for each in by_seed) for seed in sorted(shared)]
            found.append(_summary(*pairs[0], means))
    return holm(found)


def _difference_by_seed(first: Contender, second: Contender, measure: Measure) -> dict[int, float]:
    ours, theirs = first.by_seed(measure), second.by_seed(measure)
    return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}


def _summary(first: Contender, second: Contender, differences: Sequence[float]) -> PairedDifference:
    value, low, high, p_value = mean_interval(differences)
    return PairedDifference(
        first=first,
        second=second,
        value=value,
        low=low,
        high=high,
        p_value=p_value,
        num_pairs=len(differences),
        num_better=sum(each > 0 for each in differences),
        num_worse=sum(each < 0 for each in differences),
    )


def mean_interval(differences: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the mean, the ends of its 95% t interval, and the p-value of a mean of zero."""
    value, count = fmean(differences), len(differences)
    if count < 2:
        return value, math.nan, math.nan, 1.0
    error = stdev(differences) / math.sqrt(count)
    if error <= ROUNDING * abs(value):
        # equal differences have no spread to estimate: use the sign test
        return value, value, value, 2.0 ** (1 - count) if value else 1.0
    reach = t_quantile(LEVEL, count - 1) * error
    return value, value - reach, value + reach, t_probability(value / error, count - 1)


def holm(differences: Sequence[PairedDifference]) -> list[PairedDifference]:
    """Return the differences with p-values adjusted by Holm's method.

    The smallest p-value is multiplied by the number of comparisons, the next by one less, and so
    on; adjusted p-values never decrease.
    """
    order = sorted(range(len(differences)), key=lambda place: differences[place].p_value)
    adjusted = list(differences)
    highest = 0.0
    for rank, place in enumerate(order):
        scaled = differences[place].p_value * (len(order) - rank)
        highest = max(highest, min(scaled, 1.0))
        adjusted[place] = replace(differences[place], adjusted_p=highest)
    return adjusted


def common_label(labels: Sequence[str]) -> str:
    """Return the words that all labels begin with, such as "GRPO" of "GRPO, clip 0.2" and others.

    Labels without a common beginning are all listed.
    """
    split = [label.split() for label in labels]
    shared: list[str] = []
    for words in zip(*split, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    # "GRPO, clip" becomes "GRPO"
    found = " ".join(shared).split(",")[0].strip()
    return found or " / ".join(labels)


def _pairings(
    rivals: Sequence[Contender], subject: ArmResult | None
) -> Iterable[tuple[Contender, Contender]]:
    ours = next((each for each in rivals if subject in each.members), None) if subject else None
    if ours is None:
        return combinations(rivals, 2)
    return [(ours, other) for other in rivals if other is not ours]


def _by_problem(results: StudyResults, arms: Sequence[ArmResult]) -> list[PairedDifference]:
    """Compare evaluations with a single seed, paired by problem."""
    if len(results.seeds) > 1:
        return []
    alone = [Contender.of(arm) for arm in arms if arm.runs[0].evaluation is not None]
    subject = results.subject_in(arms[0].regime)
    return [_over_problems(first, second) for first, second in _pairings(alone, subject)]


def _over_problems(first: Contender, second: Contender) -> PairedDifference:
    ours, theirs = (each.members[0].runs[0].evaluation for each in (first, second))
    assert ours is not None
    assert theirs is not None
    last = compare(theirs, ours).differences[-1]
    return PairedDifference(
        first=first,
        second=second,
        value=last.value,
        low=last.low,
        high=last.high,
        p_value=last.p_value,
        num_pairs=last.num_problems,
        num_better=0,
        num_worse=0,
        unit="problem",
    )


def outcomes(differences: Iterable[PairedDifference]) -> Mapping[Outcome, int]:
    """Count the outcomes."""
    counts = dict.fromkeys(Outcome, 0)
    for each in differences:
        counts[each.outcome] += 1
    return counts


def t_probability(t: float, degrees: int) -> float:
    """Return P(|T| >= |t|) for Student's t distribution, exactly and without scipy.

    A finite sum for integer degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(is_odd, degrees - 1, 2):
        total += term
        term *= square * (k + 1) / (k + 2)
    inside = math.sin(angle) * total
    if is_odd:
        inside = (angle + inside) * 2 / math.pi
    return min(max(1.0 - inside, 0.0), 1.0)


def t_quantile(level: float, degrees: int) -> float:
    """Return the t with P(|T| <= t) = level."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) > 1.0 - level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_probability(middle, degrees) > 1.0 - level:
            low = middle
        else:
            high = middle
    return (low + high) / 2
