"""Arms compared seed by seed, and how sure one can be of what comes out.

Two arms with the same seed start from the same weights and meet the same prompts, so their
difference varies less than their rewards: seeds are paired. The interval is that of Student's t on
the differences, and where several comparisons are made, a difference counts as clear only by Holm's
rule over all of them.

A family, such as GRPO over its clip ranges, is one contender: the mean of its members. Where
benchmarks were evaluated with a single seed, problems are paired instead of seeds, and every arm
stands for itself.
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
from trustbatch.studies.student_t import t_probability, t_quantile

ROUNDING = 1e-9
"""of a mean: a deviation below it is no deviation"""


class Outcome(StrEnum):
    """What a comparison says of the first contender."""

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
        """Return an arm, or several with what their labels share."""
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
        """What a person reads of the regime."""
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
        """Return the measure of every seed that all members have it of."""
        values = [member.by_seed(measure) for member in self.members]
        shared = set.intersection(*(set(each) for each in values))
        return {seed: fmean(each[seed] for each in values) for seed in sorted(shared)}

    def mean(self, measure: Measure) -> float | None:
        """Return the mean over seeds, or nothing where no seed has it."""
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
    """ends of the 95% interval; NaN where a single pair says nothing about it"""
    p_value: float
    num_pairs: int
    num_better: int
    num_worse: int
    unit: str = "seed"
    """what is paired"""
    adjusted_p: float = 1.0
    """by Holm's rule, over all comparisons of the study"""

    @property
    def outcome(self) -> Outcome:
        """What can be claimed."""
        if not self.adjusted_p <= 1.0 - LEVEL:
            return Outcome.UNCLEAR
        return Outcome.BETTER if self.value > 0 else Outcome.WORSE

    @property
    def has_interval(self) -> bool:
        """Whether there were pairs enough to say how far the value may be off."""
        return math.isfinite(self.low)


def contenders(arms: Sequence[ArmResult]) -> list[Contender]:
    """Return the arms of one regime, those of a family together, in the order of the study."""
    groups: dict[str, list[ArmResult]] = {}
    for result in arms:
        family = result.arm.family
        groups.setdefault(f"family {family}" if family else result.arm.name, []).append(result)
    return [Contender.of(*members) for members in groups.values()]


def table_rows(arms: Sequence[ArmResult]) -> list[Contender]:
    """Return the arms of one regime, those of a family behind their mean."""
    rows = []
    for each in contenders(arms):
        alone = [Contender.of(member) for member in each.members]
        rows += alone if len(alone) == 1 else [each, *alone]
    return rows


def compare_study(results: StudyResults) -> list[PairedDifference]:
    """Compare within each regime: the subject with all others, or without one all with all."""
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
    """Compare over the seeds that both have; nothing where there is none."""
    by_seed = _difference_by_seed(first, second, measure)
    return _summary(first, second, list(by_seed.values())) if by_seed else None


def compare_over_regimes(results: StudyResults) -> list[PairedDifference]:
    """Compare the subject with each rival that is in every regime, by the mean over regimes.

    One number a seed and rival: what a single regime leaves unclear, all of them may not.
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
        # rewards are coarse, and equal differences say nothing of their spread: only signs count
        return value, value, value, 2.0 ** (1 - count) if value else 1.0
    reach = t_quantile(LEVEL, count - 1) * error
    return value, value - reach, value + reach, t_probability(value / error, count - 1)


def holm(differences: Sequence[PairedDifference]) -> list[PairedDifference]:
    """Return the differences with p-values that allow for the number of comparisons.

    The smallest p-value is multiplied by their number, the next by one less, and so on; none falls
    below the one before it.
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

    Where they share none, all of them.
    """
    split = [label.split() for label in labels]
    shared: list[str] = []
    for words in zip(*split, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    # "GRPO, clip" says no more than "GRPO"
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
    """Compare evaluations with a single seed over their problems, which they share."""
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
    """Return how often each outcome occurs."""
    counts = dict.fromkeys(Outcome, 0)
    for each in differences:
        counts[each.outcome] += 1
    return counts
