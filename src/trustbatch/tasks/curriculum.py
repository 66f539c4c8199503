"""A curriculum: problems that the policy solves sometimes are sampled more often than others.

Sampling is a pure function of the index and of the counts, and counts change only when groups are
observed, in the order of sampling; so a resumed run goes on exactly, with any lag.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from trustbatch.tasks.answering import answers, grade_of, reply_of
from trustbatch.tasks.base import FilteredTask, ProblemSet, Task
from trustbatch.types import Prompt, RolloutGroup, Turn


class Problems(Task, ProblemSet, FilteredTask, Protocol):
    """What a curriculum can be over: a task with an end."""


@dataclass(kw_only=True)
class Curriculum:
    """Samples the problems of another task by their measured pass rate."""

    task: Problems
    seed: int = 0
    low: float = 0.1
    high: float = 0.9
    """problems of a pass rate from low to high are in the band"""
    weight: float = 4.0
    """how much likelier one in the band, or one never sampled, is than another"""
    memory: float = 0.5
    """what remains of a problem's older counts when it is measured again"""
    pass_reward: float = 0.5
    """a completion with at least this reward has passed"""
    num_observed: int = field(default=0, init=False)
    """groups, of all problems"""
    counts: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    """by problem: samples and passes"""
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
                f"task.curriculum is for tasks with an end, and {self.task.name} has none: remove "
                "it."
            )

    @property
    def name(self) -> str:
        """That of the task."""
        return self.task.name

    @property
    def problems(self) -> Sequence[Prompt]:
        """Those of the task."""
        return self.task.problems

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt: one of a weighted order without repetitions."""
        if not self._order:
            self._order = self._weighted_order()
        problem = self.problems[self._order[(index - self.num_observed) % len(self._order)]]
        return replace(problem, id=f"{problem.id}#{index}")

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Ask the task."""
        return self.task.grade(prompt, completion)

    @property
    def answers(self) -> bool:
        """Whether the task is an environment."""
        return answers(self.task)

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Ask the task, if it is an environment."""
        return reply_of(self.task, prompt, turns)

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Ask the task."""
        return grade_of(self.task, prompt, turns)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Count the samples of graded groups that passed; ungraded ones say nothing."""
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
        """Return the counts."""
        return {"num_observed": self.num_observed, "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.num_observed = int(state["num_observed"])
        self.counts = {problem: list(counts) for problem, counts in state["counts"].items()}
        self._order = []

    def is_favored(self, problem: Prompt) -> bool:
        """Whether a problem is in the band, or was never measured."""
        if problem.id not in self.counts:
            return True
        samples, passes = self.counts[problem.id]
        return self.low <= passes / samples <= self.high

    def statements(self) -> Collection[str]:
        """Return those of the task."""
        return self.task.statements()

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the curriculum over fewer problems."""
        return self._over(self.task.without(statements, where))

    def fitted(self, num_tokens: Callable[[Prompt], int], say: Callable[[str], None]) -> Self:
        """Return the curriculum over prompts that are short enough."""
        return self._over(self.task.fitted(num_tokens, say))

    def describe(self) -> str:
        """Say what the task has, and what is favored."""
        return (
            f"{self.task.describe()}; pass rates from {self.low:g} to {self.high:g} are "
            f"{self.weight:g} times as likely"
        )

    def _over(self, task: Problems) -> Self:
        return replace(self, task=task)  # which has learnt nothing yet

    def _weighted_order(self) -> list[int]:
        """Sample all problems without putting any back, each by its weight."""
        rng = random.Random(f"{self.seed}:curriculum:{self.num_observed}")
        # an exponential waiting time whose rate is the weight: the first to come was sampled first
        times = [
            -math.log(1.0 - rng.random()) / (self.weight if self.is_favored(problem) else 1.0)
            for problem in self.problems
        ]
        return sorted(range(len(times)), key=times.__getitem__)
