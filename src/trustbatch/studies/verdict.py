"""The verdict of a study in two sentences, computed from the data, with remarks.

The first sentence says which arm is better and by how much, with an interval over seeds, or that it
can't be told. The second says how far 1-ESS rose: on nearly on-policy data, objectives hardly
differ. Remarks list runs that failed or collapsed, and the number of comparisons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trustbatch.evaluation.statistics import LEVEL
from trustbatch.studies.comparisons import (
    Contender,
    Outcome,
    PairedDifference,
    common_label,
    compare_over_regimes,
    compare_study,
    contenders,
    outcomes,
)
from trustbatch.studies.results import (
    BENCHMARKS,
    BENCHMARKS_AT_MOST,
    PEAK_DISTRUST,
    ArmResult,
    RunState,
    StudyResults,
    StudyRun,
    read_study,
)

NEARLY_ON_POLICY = 0.01
"""1-ESS below which objectives hardly differ"""
_UNKNOWN_DISTRUST = "1-ESS was not recorded, so how far off-policy the data was isn't known."
_MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of a study, or of one of its regimes."""

    sentences: tuple[str, str]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StudyVerdict(Verdict):
    """The verdict of a whole study, and of each regime if there are several."""

    differences: tuple[PairedDifference, ...]
    regimes: dict[str, Verdict]


def judge(results: StudyResults) -> StudyVerdict:
    """Compare the arms of a study, and describe the result."""
    differences = tuple(compare_study(results))
    verdicts = {regime: _regime_verdict(results, regime, differences) for regime in results.regimes}
    if len(verdicts) == 1:
        (only,) = verdicts.values()
        remarks = (*only.remarks, *_on_comparisons(differences))
        return StudyVerdict(
            sentences=only.sentences, remarks=remarks, differences=differences, regimes={}
        )
    remarks = (
        _over_regimes(results),
        *(
            [f"{results.regimes[regime]}: {remark}" for remark in verdict.remarks]
            for regime, verdict in verdicts.items()
        ),
        _on_comparisons(differences),
    )
    return StudyVerdict(
        sentences=(_overall(results, differences), _distrust_by_regime(results)),
        remarks=tuple(remark for group in remarks for remark in group),
        differences=differences,
        regimes=verdicts,
    )


def verdict(folder: Path) -> str:
    """Return the verdict of the study in a folder: its sentences, and a line per remark."""
    found = judge(read_study(folder))
    return "\n".join([" ".join(found.sentences), *found.remarks])


def signed(value: float) -> str:
    """Format a difference with its sign."""
    return f"{value:+.3f}".replace("-", _MINUS)


def plain(value: float) -> str:
    """Format a reward."""
    return f"{value:.3f}".replace("-", _MINUS)


def small(value: float) -> str:
    """Format 1-ESS or a p-value, which may be tiny."""
    return f"{value:.2g}"


def joined(parts: Sequence[str]) -> str:
    """Join the parts of a sentence with commas and "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _regime_verdict(
    results: StudyResults, regime: str, differences: Sequence[PairedDifference]
) -> Verdict:
    here = [each for each in differences if each.first.regime == regime]
    arms = results.in_regime(regime)
    leader = _leader(results, regime, here)
    facing = [_facing(each, leader) for each in here if leader in (each.first, each.second)]
    return Verdict(
        sentences=(_comparison(results, leader, facing), _second_sentence(results, arms)),
        remarks=(*_families(results, arms), *_troubles(arms)),
    )


def _leader(
    results: StudyResults, regime: str, differences: Sequence[PairedDifference]
) -> Contender | None:
    """Return the contender with the subject, or without a subject the one with the highest mean."""
    known = [each for pair in differences for each in (pair.first, pair.second)]
    subject = results.subject_in(regime)
    if subject is not None:
        return next((each for each in known if subject in each.members), None)
    return max(known, key=lambda each: each.mean(results.measure) or 0.0, default=None)


def _facing(each: PairedDifference, leader: Contender | None) -> PairedDifference:
    """Reverse a difference if the leader comes second."""
    if each.first == leader:
        return each
    return PairedDifference(
        first=each.second,
        second=each.first,
        value=-each.value,
        low=-each.high,
        high=-each.low,
        p_value=each.p_value,
        num_pairs=each.num_pairs,
        num_better=each.num_worse,
        num_worse=each.num_better,
        unit=each.unit,
        adjusted_p=each.adjusted_p,
    )


def _comparison(
    results: StudyResults, leader: Contender | None, facing: Sequence[PairedDifference]
) -> str:
    if leader is None or not facing:
        return "Nothing can be said yet: no seed has been finished by two arms that are compared."
    measure = results.measure.name
    if not any(each.has_interval for each in facing):
        each_by = joined([f"from {each.second.label} by {signed(each.value)}" for each in facing])
        return (
            f"With one seed it can't be told which arm is better: {leader.label} differs in "
            f"{measure} {each_by}."
        )
    parts = []
    for outcome, words in (
        (Outcome.BETTER, "is better than"),
        (Outcome.WORSE, "is worse than"),
        (Outcome.UNCLEAR, "can't be told from"),
    ):
        found = [_against(each) for each in facing if each.outcome is outcome]
        if found:
            parts.append(f"{words} {joined(found)}")
    counts = sorted({each.num_pairs for each in facing})
    unit = facing[0].unit
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"{leader.label} {'; it '.join(parts)}: differences in {measure} with 95% intervals, "
        f"paired over {span} {unit}s."
    )


def _against(each: PairedDifference) -> str:
    if not each.has_interval:
        return f"{each.second.label} ({signed(each.value)}, a single {each.unit})"
    value = f"{signed(each.value)}, {signed(each.low)} to {signed(each.high)}"
    if each.unit == "seed":
        ahead = max(each.num_better, each.num_worse)
        way = "higher" if each.num_better >= each.num_worse else "lower"
        value += f", {way} with {ahead} of {each.num_pairs} seeds"
    return f"{each.second.label} ({value})"


def _second_sentence(results: StudyResults, arms: Sequence[ArmResult]) -> str:
    if _peaks(arms):
        return _distrust(results, arms)
    if results.measure is BENCHMARKS:
        return _most_samples(arms)
    return _UNKNOWN_DISTRUST


def _most_samples(arms: Sequence[ArmResult]) -> str:
    """Return pass@k with all samples: it falls when a policy loses diversity."""
    spreads = [(arm.spread(BENCHMARKS_AT_MOST), arm.label) for arm in arms]
    known = [f"{plain(spread.mean)} with {label}" for spread, label in spreads if spread]
    if not known:
        return _UNKNOWN_DISTRUST
    k = max(run.scores[-1].pass_at_k[-1].k for arm in arms for run in arm.runs if run.scores)
    return f"pass@{k} is {joined(known)}."


def _distrust(results: StudyResults, arms: Sequence[ArmResult]) -> str:
    peaks = _peaks(arms)
    highest, label = max(peaks)
    subject = results.subject_in(arms[0].regime)
    own = subject.spread(PEAK_DISTRUST) if subject else None
    if subject is None or own is None or subject.label == label:
        first = f"1-ESS rose to {small(highest)} at its highest, with {label}"
    else:
        first = (
            f"1-ESS rose to {small(own.mean)} with {subject.label} and at its highest to "
            f"{small(highest)}, with {label}"
        )
    if highest < NEARLY_ON_POLICY:
        return (
            f"{first}: this data was nearly on-policy, where objectives have little to differ in."
        )
    return f"{first} (highest mean over a tenth of the steps)."


def _peaks(arms: Sequence[ArmResult]) -> list[tuple[float, str]]:
    spreads = [(arm.spread(PEAK_DISTRUST), arm.label) for arm in arms]
    return [(spread.mean, label) for spread, label in spreads if spread is not None]


def _families(results: StudyResults, arms: Sequence[ArmResult]) -> list[str]:
    remarks = []
    for each in contenders(arms):
        spreads = [(member.spread(results.measure), member.label) for member in each.members]
        means = [(spread.mean, label) for spread, label in spreads if spread is not None]
        over = each.spread(results.measure)
        if len(each.members) < 2 or over is None or over.deviation is None:
            continue
        (low, worst), (high, best) = min(means), max(means)
        name = common_label([member.label for member in each.members])
        remarks.append(
            f"{name} over its {over.count} settings: mean {results.measure.name} "
            f"{plain(over.mean)}, deviation {plain(over.deviation)}, from {plain(low)} ({worst}) "
            f"to {plain(high)} ({best})."
        )
    return remarks


def _troubles(arms: Sequence[ArmResult]) -> list[str]:
    missing = [arm for arm in arms if len(arm.in_state(RunState.MISSING)) == len(arm.runs)]
    remarks = [f"Not run: {joined([arm.label for arm in missing])}."] if missing else []
    for arm in arms:
        if arm in missing:
            continue
        total = len(arm.runs)
        if failed := arm.in_state(RunState.FAILED):
            remarks.append(
                f"{arm.label} failed with {_seeds(failed, total)}; what it did not finish is not "
                "in the numbers."
            )
        waiting = arm.in_state(RunState.UNFINISHED) + arm.in_state(RunState.MISSING)
        if waiting:
            remarks.append(f"{arm.label} is not finished with {_seeds(waiting, total)}.")
        if collapsed := arm.collapsed:
            steps = sorted({run.collapse_step or 0 for run in collapsed})
            word = "step" if len(steps) == 1 else "steps"
            remarks.append(
                f"{arm.label} collapsed with {_seeds(collapsed, total)}, at {word} "
                f"{joined([str(step) for step in steps])}."
            )
    return remarks


def _seeds(runs: Sequence[StudyRun], total: int) -> str:
    if len(runs) == total:
        return "every seed" if total > 1 else "its only seed"
    word = "seed" if len(runs) == 1 else "seeds"
    return f"{word} {joined([str(run.seed) for run in runs])} (of {total})"


def _on_comparisons(differences: Sequence[PairedDifference]) -> list[str]:
    if len(differences) < 2 or not any(each.has_interval for each in differences):
        return []
    alone = sum(each.p_value <= 1.0 - LEVEL for each in differences)
    return [
        f"{len(differences)} comparisons were made: better and worse are said only where chance "
        "would give such a difference anywhere among them in fewer than 5 of 100 studies (Holm's "
        f"rule). Taken one at a time, as the intervals are, {alone} would be clear."
    ]


def _overall(results: StudyResults, differences: Sequence[PairedDifference]) -> str:
    if not differences:
        return "Nothing can be said yet: no seed has been finished by two arms that are compared."
    measure = results.measure.name
    if not any(each.has_interval for each in differences):
        return (
            f"With one seed it can't be told which arm is better in {measure}, in any of the "
            f"{len(results.regimes)} regimes."
        )
    subjects = [results.subject_in(regime) for regime in results.regimes]
    subject = next((each for each in subjects if each is not None), None)
    if subject is None:
        clear = sum(each.outcome is not Outcome.UNCLEAR for each in differences)
        return (
            f"Over {len(results.regimes)} regimes, {clear} of {len(differences)} pairs of arms "
            f"differ clearly in {measure}."
        )
    label = subject.label
    counts = outcomes(differences)
    return (
        f"Of {len(differences)} comparisons in {len(results.regimes)} regimes, {label} is clearly "
        f"better in {counts[Outcome.BETTER]}{_where(differences, Outcome.BETTER)} and clearly "
        f"worse in {counts[Outcome.WORSE]}{_where(differences, Outcome.WORSE)}, and "
        f"{counts[Outcome.UNCLEAR]} can't be told: differences in {measure} with 95% intervals, "
        f"paired over {differences[0].unit}s."
    )


def _over_regimes(results: StudyResults) -> list[str]:
    """Compare by the mean over all regimes, if they have the same arms."""
    found = compare_over_regimes(results)
    if not any(each.has_interval for each in found):
        return []
    words = _comparison(results, found[0].first, found)
    return [f"Mean over the {len(results.regimes)} regimes: {words}"]


def _where(differences: Sequence[PairedDifference], outcome: Outcome) -> str:
    """List the three largest differences with an outcome."""
    found = [each for each in differences if each.outcome is outcome]
    found.sort(key=lambda each: -abs(each.value))
    if not found:
        return ""
    named = [
        f"{each.first.regime_label}: {each.second.label} by {signed(each.value)}, "
        f"{signed(each.low)} to {signed(each.high)}"
        for each in found
    ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f" ({'; '.join(named[:3])}{more})"


def _distrust_by_regime(results: StudyResults) -> str:
    peaks = []
    for regime in results.regimes:
        subject = results.subject_in(regime)
        found = _peaks([subject]) if subject else _peaks(results.in_regime(regime))
        if found:
            peaks.append((max(found)[0], results.regimes[regime]))
    if not peaks:
        return _UNKNOWN_DISTRUST
    (low, least), (high, most) = min(peaks), max(peaks)
    subject = next(filter(None, map(results.subject_in, results.regimes)), None)
    whose = f" of {subject.label}" if subject else ""
    sentence = f"1-ESS{whose} rose to between {small(low)} ({least}) and {small(high)} ({most})"
    if high < NEARLY_ON_POLICY:
        return f"{sentence}: all of this data was nearly on-policy."
    return f"{sentence} (highest mean over a tenth of the steps)."
