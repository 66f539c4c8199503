"""Grading in a process of its own."""

from collections.abc import Sequence

import ray

from trustbatch.config import Config
from trustbatch.rewards import Scorer
from trustbatch.tasks import Task
from trustbatch.types import Grade, RolloutGroup


class RewardActor:
    """Grades groups with the terms of [reward]."""

    def __init__(self, config: Config, task: Task) -> None:
        self._scorer = Scorer(task, config.reward, max_tokens=config.rollout.max_tokens)

    def prepare(self) -> None:
        """Nothing to do: graders are loaded with the first completion."""

    def grade(self, groups: Sequence[RolloutGroup]) -> list[tuple[Grade, ...]]:
        """Return the grades of each group."""
        return [group.grades for group in self._scorer.grade(groups)]


RemoteGrader = ray.remote(RewardActor)
