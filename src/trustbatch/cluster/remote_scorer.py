"""Grading by reward workers: the actor that grades, and the scorer that deals groups to actors."""

import pickle
from collections.abc import Sequence
from dataclasses import replace

import ray

from trustbatch.cluster.actor_pool import ActorPool, Worker
from trustbatch.cluster.placement import Places, machines
from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.plan.demand import Demand
from trustbatch.rewards import Scorer
from trustbatch.tasks import Task
from trustbatch.types import Grade, RolloutGroup
from trustbatch.utils.chunks import chunks_of

CHUNKS_PER_WORKER = 4
"""so that a worker with slow completions does not hold up the batch"""


class RewardActor:
    """Grades groups with the terms of [reward], in a process of its own."""

    def __init__(self, config: Config, task: Task) -> None:
        self._scorer = Scorer(
            task, config.reward, max_tokens=config.rollout.max_tokens, folder=config.run.path
        )

    def prepare(self) -> None:
        """Nothing to do: graders are loaded with the first completion."""

    def grade(self, groups: Sequence[RolloutGroup]) -> list[tuple[Grade, ...]]:
        """Return the grades of each group."""
        return [group.grades for group in self._scorer.grade(groups)]


RemoteGrader = ray.remote(RewardActor)


class RemoteScorer:
    """Deals the groups of a batch to reward workers; grading failures are reported here."""

    def __init__(self, config: Config, task: Task, own: Scorer) -> None:
        assert config.cluster is not None
        self.cluster = config.cluster
        self.own = own
        try:
            shared = ray.put(task)
        except (TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"The task {task.name!r} can't be sent to reward workers ({error}): define it in a "
                "module, or set cluster.reward_workers to 0."
            ) from error
        bundles = Demand.of(config, machines()).reward_workers
        self._places = Places(bundles, seconds=self.cluster.start_seconds, spread=True)
        self.pool = ActorPool(
            "reward worker",
            lambda number: RemoteGrader.options(**self._places.options(number)).remote(
                config, shared
            ),
            size=self.cluster.reward_workers,
            start_seconds=self.cluster.start_seconds,
            work_seconds=self.cluster.grade_seconds,
            max_restarts=self.cluster.max_restarts,
            deadline_key="cluster.grade_seconds",
        )

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a grade for every completion."""
        num_chunks = CHUNKS_PER_WORKER * len(self.pool.workers)
        size = len(groups) if self.own.needs_whole_batches else -(-len(groups) // num_chunks)
        chunks = chunks_of(groups, size)
        found: list[list[tuple[Grade, ...]]] = self.pool.run(
            chunks, lambda actor, chunk: actor.grade.remote(chunk), _note
        )
        grades = [each for part in found for each in part]
        graded = [replace(group, grades=own) for group, own in zip(groups, grades, strict=True)]
        self.own.report(graded)
        return graded

    def close(self) -> None:
        """End all reward workers."""
        self.pool.close()
        self._places.close()
        self.own.close()


def _note(worker: Worker, grades: list[tuple[Grade, ...]]) -> None:
    worker.notes["graded"] = worker.notes.get("graded", 0.0) + sum(map(len, grades))
