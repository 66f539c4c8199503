"""A curriculum: problems that the policy solves sometimes are sampled more often than others.

The order of prompts is a pure function of the index and the counts, and counts change only when
groups are observed, in sampling order; so a resumed run continues exactly, with any lag.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from trustbatch.tasks.base import (
    FilteredTask,
    ProblemSet,
    ReadsDataSets,
    ReadsFiles,
    Reply,
    Task,
    close_task,
    grade_completion,
    is_environment,
    reply_to,
)
from trustbatch.tasks.rows import PromptChecks, RowOrigin, RowTask
from trustbatch.types import Prompt, RolloutGroup, Turn


class Problems(Task, ProblemSet, FilteredTask, Protocol):
    """The tasks that a curriculum can wrap: finite ones."""


@dataclass(kw_only=True)
class Curriculum:
    """Orders the problems of another task by their measured pass rates."""

    task: Problems
    seed: int = 0
    low: float = 0.1
    high: float = 0.9
    """problems with a pass rate from low to high are favored"""
    weight: float = 4.0
    """weight of a favored or unmeasured problem, relative to the others"""
    memory: float = 0.5
    """decay of a problem's older counts when it is measured again"""
    pass_reward: float = 0.5
    """a completion passes with at least this reward"""
    num_observed: int = field(default=0, init=False)
    """number of groups, over all problems"""
    counts: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    """number of samples and of passes, by problem id"""
    _order: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError("task.curriculum needs 0 <= low <= high <= 1.")
        if not self.weight >= 1.0:
            raise ValueError("task.curriculum.weight must be at least 1.")
        if not 0.0 <= self.memory <= 1.0:
            raise ValueError("task.curriculum.memory must be from 0 to 1.")
        if not isinstance(self.task, ProblemSet) or not isinstance(self.task, FilteredTask):
            raise ValueError(
                f"task.curriculum requires a finite task, and {self.task.name} is endless: remove "
                "it."
            )

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def problems(self) -> Sequence[Prompt]:
        """The task's problems."""
        return self.task.problems

    @property
    def seats(self) -> Sequence[Prompt]:
        """The problems, with those that are left out by their ids."""
        return getattr(self.task, "seats", self.task.problems)

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt, from a weighted order without replacement."""
        if not self._order:
            self._order = self._weighted_order()
        problem = self.seats[self._order[(index - self.num_observed) % len(self._order)]]
        return replace(problem, id=f"{problem.id}#{index}")

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return the task's grade."""
        return self.task.grade(prompt, completion)

    @property
    def is_environment(self) -> bool:
        """Whether the task is an environment."""
        return is_environment(self.task)

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        """Return the task's reply, if it is an environment."""
        return reply_to(self.task, prompt, turns)

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Return the task's grade."""
        return grade_completion(self.task, prompt, turns[-1].text, turns)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Count samples and passes of graded groups; ungraded samples are ignored."""
        for group in groups:
            rewards = [grade.reward for grade in group.grades if math.isfinite(grade.reward)]
            passed = sum(reward >= self.pass_reward for reward in rewards)
            if rewards:
                problem = group.prompt.id.rpartition("#")[0]
                samples, passes = self.counts.get(problem, (0.0, 0.0))
                self.counts[problem] = [
                    self.memory * samples + len(rewards),
                    self.memory * passes + passed,
                ]
        self.num_observed += len(groups)
        self._order = []

    def state(self) -> dict[str, Any]:
        """Return the counts as plain JSON values."""
        return {"num_observed": self.num_observed, "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.num_observed = int(state["num_observed"])
        self.counts = {problem: list(counts) for problem, counts in state["counts"].items()}
        self._order = []

    def is_favored(self, problem: Prompt) -> bool:
        """Whether a problem's pass rate is in the band, or not measured yet."""
        if problem.id not in self.counts:
            return True
        samples, passes = self.counts[problem.id]
        return self.low <= passes / samples <= self.high

    def close(self) -> None:
        """End the task's processes."""
        close_task(self.task)

    def statements(self) -> Collection[str]:
        """Return the task's problems as they are in the data."""
        return self.task.statements()

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the curriculum over fewer problems."""
        return self._over(self.task.without(statements, where))

    def fitted(self, checks: PromptChecks) -> Self:
        """Return the curriculum over prompts that can be used."""
        return self._over(self.task.fitted(checks))

    @property
    def files(self) -> Mapping[str, str]:
        """The files that the task has read."""
        return self.task.files if isinstance(self.task, ReadsFiles) else {}

    @property
    def digests(self) -> Mapping[str, str]:
        """The fingerprints of data sets that the task has read."""
        return self.task.digests if isinstance(self.task, ReadsDataSets) else {}

    def row_of(self, prompt: Prompt) -> RowOrigin | None:
        """Return where a prompt comes from, if the task knows."""
        return self.task.row_of(prompt) if isinstance(self.task, RowTask) else None

    def describe(self) -> str:
        """Return one line about the task's problems and the favored pass rates."""
        return (
            f"{self.task.describe()}; pass rates from {self.low:g} to {self.high:g} are "
            f"{self.weight:g} times as likely"
        )

    def _over(self, task: Problems) -> Self:
        return replace(self, task=task)  # without counts, which are still empty

    def _weighted_order(self) -> list[int]:
        """Return a permutation of the problems, sampled without replacement by weight.

        Problems that are left out by id have a time too, so that those of the others stay.
        """
        rng = random.Random(f"{self.seed}:curriculum:{self.num_observed}")
        # sorting by exponential times whose rates are the weights samples such a permutation
        times = [
            -math.log(1.0 - rng.random()) / (self.weight if self.is_favored(problem) else 1.0)
            for problem in self.seats
        ]
        present = {problem.id for problem in self.problems}
        seats = [seat for seat, problem in enumerate(self.seats) if problem.id in present]
        return sorted(seats, key=times.__getitem__)
