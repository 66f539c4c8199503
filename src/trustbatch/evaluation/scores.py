"""From outcomes to scores: pass@k with intervals, for each task and on average."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trustbatch.evaluation.intervals import Floats, mean_intervals
from trustbatch.evaluation.outcomes import ProblemOutcome
from trustbatch.evaluation.pass_at_k import pass_at_k_curve

AVERAGE = "average"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A mean over problems and its interval."""

    k: int
    value: float
    low: float
    high: float
    num_problems: int
    """those with at least k graded samples: the others say nothing about pass@k"""


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """All that is said of a model on one task, or on average over several."""

    name: str
    num_problems: int
    num_samples: int
    """of each problem, as sampled"""
    num_ungraded: int
    """samples that count neither as right nor as wrong"""
    truncated_fraction: float
    mean_reward: float | None
    mean_tokens: float
    pass_at_k: tuple[Score, ...]
    """for k = 1..num_samples, as far as any problem has k graded samples"""

    def at(self, k: int) -> Score | None:
        """Return pass@k, or nothing where no problem has k graded samples."""
        return next((score for score in self.pass_at_k if score.k == k), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        return asdict(self)


def score_tasks(outcomes: Mapping[str, Sequence[ProblemOutcome]]) -> list[TaskScores]:
    """Return the scores of each task; where there are several, their average comes last."""
    scores = [_score(name, [problems]) for name, problems in outcomes.items()]
    if len(outcomes) > 1:
        scores.append(_score(AVERAGE, list(outcomes.values())))
    return scores


def per_problem(outcomes: Sequence[ProblemOutcome], num_samples: int) -> Floats:
    """Return pass@k [problems, num_samples]; NaN where a problem has fewer than k graded."""
    rows = np.full((len(outcomes), num_samples), np.nan)
    for row, outcome in zip(rows, outcomes, strict=True):
        row[: outcome.graded] = pass_at_k_curve(outcome.graded, outcome.correct)
    return rows


def _score(name: str, tasks: Sequence[Sequence[ProblemOutcome]]) -> TaskScores:
    """Score one task, or several of which each counts the same, however many problems it has."""
    num_samples = max(outcome.samples for problems in tasks for outcome in problems)
    curves = [per_problem(problems, num_samples) for problems in tasks]
    # every task must have something to say about a k
    num_known = np.array([(~np.isnan(curve)).sum(axis=0) for curve in curves])
    num_ks = int((num_known > 0).all(axis=0).sum())
    curves = [curve[:, :num_ks] for curve in curves]
    values = np.mean([np.nanmean(curve, axis=0) for curve in curves], axis=0) if num_ks else []
    intervals = mean_intervals(curves) if num_ks else []
    everything = [outcome for problems in tasks for outcome in problems]
    rewards = [_mean([o.mean_reward for o in task if o.mean_reward is not None]) for task in tasks]
    return TaskScores(
        name=name,
        num_problems=len(everything),
        num_samples=num_samples,
        num_ungraded=sum(outcome.samples - outcome.graded for outcome in everything),
        truncated_fraction=_mean([_truncated_fraction(problems) for problems in tasks]),
        mean_reward=None if math.isnan(reward := _mean(rewards)) else reward,
        mean_tokens=_mean([_mean([o.mean_tokens for o in problems]) for problems in tasks]),
        pass_at_k=tuple(
            Score(
                k=k,
                value=float(value),
                low=float(low),
                high=float(high),
                num_problems=int(num_known[:, k - 1].sum()),
            )
            for k, (value, (low, high)) in enumerate(zip(values, intervals, strict=True), start=1)
        ),
    )


def _truncated_fraction(problems: Sequence[ProblemOutcome]) -> float:
    return sum(o.truncated for o in problems) / sum(o.samples for o in problems)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
