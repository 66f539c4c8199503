"""Paired comparison of two models on the same problems.

A problem that is hard for one model tends to be hard for the other, so differences per problem vary
less than scores: a paired comparison detects differences that two separate intervals hide.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trustbatch.errors import ConfigError
from trustbatch.evaluation.results import AVERAGE, EvaluationResults, ProblemOutcome
from trustbatch.evaluation.statistics import (
    LEVEL,
    Floats,
    flip_interval,
    flip_p_value,
    pass_at_k,
)

MUST_AGREE = ("samples", "temperature", "top_p", "max_tokens", "max_turns")
"""settings that must be equal for scores to be comparable"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much better the second model is on one task, or on average."""

    task: str
    num_problems: int
    """problems with enough graded samples of both models"""
    num_unequal: int
    """problems on which the models differ"""
    first: float
    second: float
    value: float
    low: float
    high: float
    p_value: float

    @property
    def is_significant(self) -> bool:
        """Whether the difference is statistically significant."""
        return self.p_value <= 1.0 - LEVEL


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between two models per task, and last on average if there are several."""

    first: str
    second: str
    k: int
    differences: tuple[Difference, ...]

    @property
    def verdict(self) -> str:
        """One sentence about the last difference."""
        last = self.differences[-1]
        where = "on average" if last.task == AVERAGE else f"on {last.task}"
        interval = f"({last.low:.3f} to {last.high:.3f}), p = {_written(last.p_value)}"
        if not last.num_unequal:
            return (
                f"{self.first} and {self.second} do not differ {where}: all "
                f"{last.num_problems:,} problems have the same pass@{self.k}, and the interval of "
                f"the difference is {last.low:+.3f} to {last.high:+.3f}."
            )
        if not last.is_significant:
            return (
                f"{self.first} and {self.second} do not differ significantly {where}: "
                f"pass@{self.k} differs by {last.value:+.3f} {interval}."
            )
        better, worse, sign = self.second, self.first, 1
        if last.value < 0:
            better, worse, sign = worse, better, -1
            interval = f"({-last.high:.3f} to {-last.low:.3f}), p = {_written(last.p_value)}"
        return (
            f"{better} is better than {worse} {where}: by {sign * last.value:.3f} in "
            f"pass@{self.k} {interval}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        return asdict(self) | {"verdict": self.verdict}


def compare(first: EvaluationResults, second: EvaluationResults, *, k: int = 1) -> Comparison:
    """Compare pass@k of two models; refuse evaluations with different settings."""
    _refuse_unlike(first, second)
    if not 1 <= k <= first.settings["samples"]:
        raise ConfigError(
            f"pass@{k} can't be compared with {first.settings['samples']} samples of each problem: "
            "choose a smaller k."
        )
    pairs = {
        task: _paired(first.outcomes[task], second.outcomes[task], k) for task in first.outcomes
    }
    for task, scores in pairs.items():
        if not len(scores):
            raise ConfigError(
                f"No problem of {task} has {k} graded samples of both {first.model} and "
                f"{second.model}: see in samples.jsonl why the grader failed."
            )
    differences = [_difference(task, [scores]) for task, scores in pairs.items()]
    if len(pairs) > 1:
        differences.append(_difference(AVERAGE, list(pairs.values())))
    names = (first.model, second.model)
    if names[0] == names[1]:
        names = (f"{names[0]} (first)", f"{names[1]} (second)")
    return Comparison(first=names[0], second=names[1], k=k, differences=tuple(differences))


def _paired(first: Sequence[ProblemOutcome], second: Sequence[ProblemOutcome], k: int) -> Floats:
    """Return pass@k [problems, 2] of the problems that have k graded samples of both models."""
    rows = [
        [pass_at_k(one.graded, one.correct, k), pass_at_k(two.graded, two.correct, k)]
        for one, two in zip(first, second, strict=True)
        if min(one.graded, two.graded) >= k
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _difference(task: str, parts: Sequence[Floats]) -> Difference:
    """Return the difference over tasks, each of which has equal weight."""
    scores = np.concatenate(parts)
    weights = np.concatenate([np.full(len(part), 1.0 / len(part) / len(parts)) for part in parts])
    differences = scores[:, 1] - scores[:, 0]
    low, high = flip_interval(differences, weights)
    first, second = weights @ scores
    return Difference(
        task=task,
        num_problems=len(scores),
        num_unequal=int(np.count_nonzero(differences)),
        first=float(first),
        second=float(second),
        value=float(second - first),
        low=low,
        high=high,
        p_value=flip_p_value(differences, weights),
    )


def _refuse_unlike(first: EvaluationResults, second: EvaluationResults) -> None:
    for key in MUST_AGREE:
        ours, theirs = first.settings.get(key), second.settings.get(key)
        if ours != theirs:
            raise ConfigError(
                f"{first.model} was evaluated with {key} = {ours} and {second.model} with "
                f"{theirs}: evaluate both with the same settings."
            )
    ours, theirs = first.settings["tasks"], second.settings["tasks"]
    if list(ours) != list(theirs):
        raise ConfigError(
            f"{first.model} was evaluated on {', '.join(ours)} and {second.model} on "
            f"{', '.join(theirs)}: evaluate both on the same tasks."
        )
    for task in ours:
        if ours[task] != theirs[task]:
            raise ConfigError(
                f"{first.model} and {second.model} were given different problems of {task}: "
                "evaluate both with the same data, template and limit."
            )


def _written(p_value: float) -> str:
    return "0.0002 or less" if p_value <= 2e-4 else f"{p_value:.2g}"
