"""Scoring: from completions to a grade each."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trustbatch.errors import RewardError
from trustbatch.rewards.grading import grade_completion
from trustbatch.tasks.base import Task
from trustbatch.types import Grade, RolloutGroup


class Scorer:
    """Grades the completions of a task's prompts.

    A grader that fails is a fault of the grader, not of the answer: it stops the run with the
    prompt's id, and is never turned into reward 0.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a grade for every completion."""
        return [
            replace(
                group,
                grades=tuple(
                    Grade(reward=self._grade(group, sample))
                    for sample in range(len(group.completions))
                ),
            )
            for group in groups
        ]

    def close(self) -> None:
        """End everything that belongs to it."""

    def _grade(self, group: RolloutGroup, sample: int) -> float:
        try:
            completion = group.completions[sample]
            reward = grade_completion(self.task, group.prompt, completion.text, completion.turns)
        except Exception as error:  # a user's code may raise anything; the cause stays attached
            raise RewardError(
                f"The grader of task {self.task.name} failed on prompt {group.prompt.id!r} with "
                f"{type(error).__name__}: {error}; fix it, and the same command continues the run."
            ) from error
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise RewardError(
                f"The grader of task {self.task.name} returned {reward!r} for prompt "
                f"{group.prompt.id!r}: make it return a finite number."
            )
        return float(reward)


def rewards_of(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the rewards [groups, samples] of graded groups in float64."""
    rows = [[grade.reward for grade in group.grades] for group in groups]
    return torch.tensor(rows, dtype=torch.float64)
