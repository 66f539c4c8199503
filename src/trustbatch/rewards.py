"""Scoring: from completions to a reward each."""

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from trustbatch.errors import RewardError
from trustbatch.tasks.base import Task
from trustbatch.types import RolloutGroup


def score(groups: Sequence[RolloutGroup], task: Task) -> Tensor:
    """Grade every completion; returns rewards [groups, samples] in float64.

    A grader that fails is a fault of the grader, not of the answer: it stops the run with the
    prompt's id, and is never turned into reward 0.
    """
    rows = [
        [_grade(task, group, sample) for sample in range(len(group.completions))]
        for group in groups
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _grade(task: Task, group: RolloutGroup, sample: int) -> float:
    try:
        reward = task.grade(group.prompt, group.completions[sample].text)
    except Exception as error:  # a user's code may raise anything; the cause stays attached
        raise RewardError(
            f"The grader of task {task.name} failed on prompt {group.prompt.id!r} with "
            f"{type(error).__name__}: {error}; fix it, and the same command continues the run."
        ) from error
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise RewardError(
            f"The grader of task {task.name} returned {reward!r} for prompt {group.prompt.id!r}: "
            "make it return a finite number."
        )
    return float(reward)
