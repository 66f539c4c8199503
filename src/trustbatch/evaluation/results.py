"""Results of an evaluation: the outcome of every problem, and the scores computed from them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trustbatch.errors import ConfigError
from trustbatch.evaluation.statistics import Floats, mean_intervals, pass_at_k_curve
from trustbatch.types import FinishReason, GradeStatus

RESULTS_FILE = "results.json"
AVERAGE = "average"
"""name of the scores averaged over tasks"""
CORRECT = 1.0
"""a sample with at least this reward is correct"""


@dataclass(frozen=True, kw_only=True)
class ProblemOutcome:
    """Counts of one problem, from which all scores are computed.

    Ungraded samples count neither as correct nor as wrong: `graded` does not include them.
    """

    id: str
    samples: int
    graded: int
    correct: int
    truncated: int
    """samples that ended at max_tokens"""
    mean_reward: float | None
    """over graded samples"""
    mean_tokens: float

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "ProblemOutcome":
        """Count the samples of one line of samples.jsonl."""
        samples = record["samples"]
        rewards = [s["reward"] for s in samples if s["status"] == GradeStatus.GRADED]
        return cls(
            id=record["id"],
            samples=len(samples),
            graded=len(rewards),
            correct=sum(reward >= CORRECT for reward in rewards),
            truncated=sum(s["finish_reason"] == FinishReason.LENGTH for s in samples),
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
            mean_tokens=sum(s["tokens"] for s in samples) / len(samples),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Score:
    """pass@k, averaged over problems, and its interval."""

    k: int
    value: float
    low: float
    high: float
    num_problems: int
    """problems with at least k graded samples; others have no pass@k"""


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The scores of a model on one task, or averaged over several."""

    name: str
    num_problems: int
    num_samples: int
    """per problem, including ungraded ones"""
    num_ungraded: int
    """samples that count neither as correct nor as wrong"""
    truncated_fraction: float
    mean_reward: float | None
    mean_reward_low: float | None
    """of its interval, as for `Score`"""
    mean_reward_high: float | None
    mean_tokens: float
    pass_at_k: tuple[Score, ...]
    """for k = 1..num_samples, up to the largest number of graded samples of a problem"""

    def at(self, k: int) -> Score | None:
        """Return pass@k, or None if no problem has k graded samples."""
        return next((score for score in self.pass_at_k if score.k == k), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        return asdict(self)


def score_tasks(outcomes: Mapping[str, Sequence[ProblemOutcome]]) -> list[TaskScores]:
    """Return the scores of each task, and last their average if there are several."""
    scores = [_score(name, [problems]) for name, problems in outcomes.items()]
    if len(outcomes) > 1:
        scores.append(_score(AVERAGE, list(outcomes.values())))
    return scores


def _pass_at_k_rows(outcomes: Sequence[ProblemOutcome], num_samples: int) -> Floats:
    """Return pass@k [problems, num_samples]; NaN where fewer than k samples are graded."""
    rows = np.full((len(outcomes), num_samples), np.nan)
    for row, outcome in zip(rows, outcomes, strict=True):
        row[: outcome.graded] = pass_at_k_curve(outcome.graded, outcome.correct)
    return rows


def _score(name: str, tasks: Sequence[Sequence[ProblemOutcome]]) -> TaskScores:
    """Score one task, or the unweighted average of several."""
    num_samples = max(outcome.samples for problems in tasks for outcome in problems)
    curves = [_pass_at_k_rows(problems, num_samples) for problems in tasks]
    # only values of k that every task has
    num_known = np.array([(~np.isnan(curve)).sum(axis=0) for curve in curves])
    num_ks = int((num_known > 0).all(axis=0).sum())
    curves = [curve[:, :num_ks] for curve in curves]
    values = np.mean([np.nanmean(curve, axis=0) for curve in curves], axis=0) if num_ks else []
    intervals = mean_intervals(curves) if num_ks else []
    everything = [outcome for problems in tasks for outcome in problems]
    reward, reward_low, reward_high = _mean_reward(tasks)
    return TaskScores(
        name=name,
        num_problems=len(everything),
        num_samples=num_samples,
        num_ungraded=sum(outcome.samples - outcome.graded for outcome in everything),
        truncated_fraction=_mean([_truncated_fraction(problems) for problems in tasks]),
        mean_reward=reward,
        mean_reward_low=reward_low,
        mean_reward_high=reward_high,
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


def _mean_reward(
    tasks: Sequence[Sequence[ProblemOutcome]],
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the mean reward and its interval; none where a task has no graded sample.

    Rewards may leave 0 to 1: intervals are those of the rewards scaled to that range.
    """
    rewards = [
        np.array([[np.nan if o.mean_reward is None else o.mean_reward] for o in problems])
        for problems in tasks
    ]
    if any(np.isnan(each).all() for each in rewards):
        return None, None, None
    least = min(0.0, *(float(np.nanmin(each)) for each in rewards))
    width = max(1.0, *(float(np.nanmax(each)) for each in rewards)) - least
    ((low, high),) = mean_intervals([(each - least) / width for each in rewards])
    value = _mean([float(np.nanmean(each)) for each in rewards])
    return value, min(least + width * low, value), max(least + width * high, value)


def _truncated_fraction(problems: Sequence[ProblemOutcome]) -> float:
    return sum(o.truncated for o in problems) / sum(o.samples for o in problems)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True, kw_only=True)
class EvaluationResults:
    """The outcomes of one model on some tasks."""

    model: str
    settings: Mapping[str, Any]
    """everything that determines the samples; see `settings.recorded_settings`"""
    outcomes: Mapping[str, Sequence[ProblemOutcome]]
    """by task, in the order of its problems"""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> list[TaskScores]:
        """Scores of each task, and last their average if there are several."""
        return score_tasks(self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        return {
            "model": self.model,
            "settings": dict(self.settings),
            "scores": [score.to_dict() for score in self.scores],
            "problems": {
                task: [outcome.to_dict() for outcome in outcomes]
                for task, outcomes in self.outcomes.items()
            },
            "environment": dict(self.environment),
        }


def read_results(folder: Path) -> EvaluationResults:
    """Read the results of a finished evaluation."""
    file = folder / RESULTS_FILE
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no {RESULTS_FILE}: name the folder of a finished evaluation."
        )
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        return EvaluationResults(
            model=tree["model"],
            settings=tree["settings"],
            outcomes={
                task: [ProblemOutcome(**row) for row in rows]
                for task, rows in tree["problems"].items()
            },
            environment=tree["environment"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} can't be read ({error}): delete it, and run the same evaluation again."
        ) from error
