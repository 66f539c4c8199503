"""results.json: the settings, the scores and the outcome of every problem."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.evaluation.outcomes import ProblemOutcome
from trustbatch.evaluation.scores import TaskScores, score_tasks

RESULTS_FILE = "results.json"


@dataclass(frozen=True, kw_only=True)
class EvaluationResults:
    """One model on some tasks."""

    model: str
    settings: Mapping[str, Any]
    """everything that decides what is sampled; see `settings.py`"""
    outcomes: Mapping[str, Sequence[ProblemOutcome]]
    """by task, in the order of its problems"""
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> list[TaskScores]:
        """Of each task, and last their average where there are several."""
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
            f"{file} can't be read ({error}): delete it, and the same evaluation makes it again."
        ) from error
