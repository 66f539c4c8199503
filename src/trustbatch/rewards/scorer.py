"""Scoring: one grade per completion.

A failed grader says nothing about the completion, which therefore gets a status and a reason
instead of reward 0; `reward.ungraded` configures how it is treated. `reward.truncated` configures
how completions that end at the token limit are treated.
"""

import contextlib
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trustbatch.errors import ConfigError, RewardError
from trustbatch.rewards.base import BatchTerm, Sample, ServerTerm, Term, is_finite
from trustbatch.rewards.config import RewardConfig
from trustbatch.rewards.functions import BatchFunctionTerm
from trustbatch.rewards.judge import JudgeTerm
from trustbatch.rewards.terms import OverlongTerm, PooledTerms, TaskTerm
from trustbatch.tasks.base import Task
from trustbatch.tasks.rows import or_leave_out
from trustbatch.types import FinishReason, Grade, GradeStatus, RolloutGroup
from trustbatch.utils.distributed import on_rank_zero
from trustbatch.utils.terminal import plain_line
from trustbatch.utils.worker import Outcome, describe, run_grader
from trustbatch.utils.worker_pool import NotPortable, Words, WorkerPool

logger = logging.getLogger(__name__)

JUDGE_FOLDER = "judge"
"""in the run folder"""
MAX_UNGRADED_BATCHES = 3
"""consecutive batches without a single grade that end the run"""

_LEFT_OUT = Grade.failed(
    GradeStatus.TRUNCATED, 'it was truncated, and reward.truncated is "leave_out"'
)


@dataclass(frozen=True, slots=True)
class _Weighted:
    label: str
    weight: float
    term: Term | BatchTerm


class Scorer:
    """Grades the completions of a task's prompts by the terms of [reward]."""

    def __init__(
        self,
        task: Task,
        reward: RewardConfig | None = None,
        *,
        max_tokens: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder` is where judges keep what they were told, unless they name another."""
        self.task = task
        self.reward = RewardConfig() if reward is None else reward
        self._terms = _build_terms(task, self.reward, max_tokens, folder)
        self._pools: dict[str, WorkerPool] = {}
        self._graded_in_process: set[str] = set()
        self._ungraded_batches = 0

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a grade for every completion."""
        graded_groups = self.grade(groups)
        self.report(graded_groups)
        return graded_groups

    def grade(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Grade every completion; `report` then logs what could not be graded.

        No term sees episodes that failed, nor, if `reward.truncated` is "leave_out", truncated
        completions: a function of the whole batch compares only the others.
        """
        decided = [self._decided(sample) for sample in _samples(groups)]
        pairs = zip(_samples(groups), decided, strict=True)
        rest = iter(self._grades([sample for sample, grade in pairs if grade is None]))
        grades = iter(next(rest) if grade is None else grade for grade in decided)
        return [
            replace(group, grades=tuple(next(grades) for _ in group.completions))
            for group in groups
        ]

    def start(self, num_samples: int) -> None:
        """Start the grading processes for a batch, and return while they load the terms.

        What is wrong with a grader is said where completions are graded.
        """
        _, pooled = _divide(self._terms)
        if pooled.terms:
            self._start("terms", pooled, num_samples)
        for weighted in self._terms:
            if isinstance(weighted.term, BatchFunctionTerm):
                self._start(f"batch:{weighted.label}", weighted.term, 1)

    def prepare(self) -> None:
        """Load the terms in a grading process, to check that it works."""
        _, pooled = _divide(self._terms)
        if pooled.terms:
            self._in_processes("terms", pooled, [])
        for weighted in self._terms:
            if isinstance(weighted.term, BatchFunctionTerm):
                self._batch(weighted.label, weighted.term, [])

    def report(self, groups: Sequence[RolloutGroup]) -> None:
        """Log the ungraded completions; stop if configured, or if nothing can be graded."""
        self._report(_samples(groups), [grade for group in groups for grade in group.grades])

    @property
    def needs_whole_batches(self) -> bool:
        """Whether a term compares all completions of a batch, so that it must not be split."""
        return any(isinstance(weighted.term, BatchFunctionTerm) for weighted in self._terms)

    def close(self) -> None:
        """End all grading processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _decided(self, sample: Sample) -> Grade | None:
        """Return the grade of a sample that no term sees; None for the others."""
        if sample.failure is not None:
            return self._ungraded(sample.failure.status, sample.failure.reason)
        is_left_out = sample.is_truncated and self.reward.truncated == "leave_out"
        return _LEFT_OUT if is_left_out else None

    def _grades(self, samples: Sequence[Sample]) -> list[Grade]:
        """Evaluate all terms, and return their weighted sum per sample."""
        local, pooled = _divide(self._terms)
        columns = [[run_grader(local, sample) for sample in samples]] if local.terms else []
        if pooled.terms:
            columns.append(self._in_processes("terms", pooled, samples))
        for weighted in self._terms:
            if isinstance(weighted.term, ServerTerm):
                found = weighted.term.outcomes(samples)
                columns.append([_named(weighted.label, outcome) for outcome in found])
            elif isinstance(weighted.term, BatchFunctionTerm):
                columns.append(self._batch(weighted.label, weighted.term, samples))
        return [self._grade(row) for row in zip(*columns, strict=True)]

    def _batch(
        self, label: str, term: BatchFunctionTerm, samples: Sequence[Sample]
    ) -> list[Outcome]:
        batches = [list(samples)] if samples else []
        found = self._in_processes(f"batch:{label}", term, batches)
        if not found:
            return []
        (outcome,) = found
        if outcome.status is not GradeStatus.GRADED:
            return [_named(label, outcome)] * len(samples)
        failed = Outcome(GradeStatus.FAILED, reason="it returned something not a finite number")
        return [
            _named(label, failed if value is None else Outcome(GradeStatus.GRADED, value))
            for value in outcome.value
        ]

    def _in_processes(
        self, name: str, grade: PooledTerms | BatchFunctionTerm, items: Sequence[Any]
    ) -> list[Outcome]:
        """Grade in a pool, or in this process if the grader can't be sent to another."""
        if name not in self._graded_in_process:
            try:
                pool = self._pool(name, grade)
                if not items:
                    pool.prepare()
                return pool.run(items)
            except NotPortable as error:
                self._graded_in_process.add(name)
                pool = self._pools.pop(name, None)
                if pool is not None:
                    pool.close()
                self._load_in_process(grade)
                logger.warning(
                    "The grader of task %s can't be sent to another process (%s): it runs in this "
                    "one, without limits of time and memory; define it in a module to have them.",
                    self.task.name,
                    error,
                )
        return [run_grader(grade, item) for item in items]

    def _start(self, name: str, grade: PooledTerms | BatchFunctionTerm, num_items: int) -> None:
        if name not in self._graded_in_process:
            with contextlib.suppress(NotPortable):
                self._pool(name, grade).start(num_items)

    def _pool(self, name: str, grade: PooledTerms | BatchFunctionTerm) -> WorkerPool:
        """Return the pool of a grader; raises NotPortable if it can't be pickled."""
        if name not in self._pools:
            is_batch = isinstance(grade, BatchFunctionTerm)
            limit = f"time_limit of the term {name.removeprefix('batch:')}"
            self._pools[name] = WorkerPool(
                grade,
                workers=self.reward.workers or os.cpu_count() or 1,
                time_limit=grade.time_limit if is_batch else self.reward.time_limit,
                memory_limit_gib=self.reward.memory_limit_gib,
                environment=self.reward.environment,
                words=Words(limit=limit) if is_batch else Words(),
            )
        return self._pools[name]

    def _load_in_process(self, grade: PooledTerms | BatchFunctionTerm) -> None:
        """Load a grader that could not be loaded elsewhere; a broken one fails here, too."""
        try:
            grade.prepare()
        except Exception as error:  # importing a user's module may raise anything
            raise RewardError(
                f"The reward of task {self.task.name} can't be loaded ({describe(error)}): fix it, "
                "and the same command continues the run."
            ) from error

    def _grade(self, row: Sequence[Outcome]) -> Grade:
        """Return the weighted sum of the parts, or the reason why one is missing."""
        for outcome in row:
            if outcome.status is not GradeStatus.GRADED:
                return self._ungraded(outcome.status, outcome.reason)
        parts = {label: value for outcome in row for label, value in outcome.value.items()}
        reward = sum(weighted.weight * parts[weighted.label] for weighted in self._terms)
        if not is_finite(reward):
            return self._ungraded(GradeStatus.FAILED, f"the weighted sum of {parts} is {reward}")
        return Grade(reward=reward, parts=parts if self.reward.terms else {})

    def _ungraded(self, status: GradeStatus, reason: str) -> Grade:
        reward = self.reward.ungraded
        return Grade(
            reward=math.nan if isinstance(reward, str) else reward, status=status, reason=reason
        )

    def _report(self, samples: Sequence[Sample], grades: Sequence[Grade]) -> None:
        """Log ungraded completions, and raise after too many batches without any grade."""
        ungraded = [
            (sample, grade)
            for sample, grade in zip(samples, grades, strict=True)
            if grade.status is not GradeStatus.GRADED
        ]
        failed = [pair for pair in ungraded if pair[1].status is not GradeStatus.TRUNCATED]
        if failed:
            self._report_failed(failed, len(samples))
        is_all = bool(ungraded) and len(ungraded) == len(samples)
        self._ungraded_batches = self._ungraded_batches + 1 if is_all else 0
        if self._ungraded_batches < MAX_UNGRADED_BATCHES:
            return
        if not failed:
            raise RewardError(
                f"No completion of the last {self._ungraded_batches} batches could be graded, and "
                'all of the last one were truncated, which reward.truncated = "leave_out" drops: '
                'raise rollout.max_tokens, or set reward.truncated = "grade".'
            )
        raise RewardError(
            f"No completion of the last {self._ungraded_batches} batches could be graded, the "
            f"last of {_first(failed)}; fix the grader, and the same command continues the run."
        )

    def _report_failed(self, failed: Sequence[tuple[Sample, Grade]], num_samples: int) -> None:
        if self.reward.ungraded == "stop":
            raise RewardError(
                f"The grader of task {self.task.name} failed on {_first(failed)}; fix it"
                f"{or_leave_out(self.task, failed[0][0].prompt)}, and the same command continues "
                "the run."
            )
        logger.warning(
            "%d of %d completions could not be graded; the first is of %s",
            len(failed),
            num_samples,
            _first(failed),
        )


def _first(failed: Sequence[tuple[Sample, Grade]]) -> str:
    """Return the prompt id and the reason of the first failure."""
    sample, grade = failed[0]
    return f"prompt {sample.prompt.id!r}: {plain_line(grade.reason)}"


def _samples(groups: Sequence[RolloutGroup]) -> list[Sample]:
    return [
        Sample(
            prompt=group.prompt,
            completion=completion.text,
            num_tokens=len(completion.token_ids),
            turns=completion.turns,
            is_truncated=completion.finish_reason is FinishReason.LENGTH,
            failure=completion.failure,
        )
        for group in groups
        for completion in group.completions
    ]


def _build_terms(
    task: Task, reward: RewardConfig, max_tokens: int | None, folder: Path | None
) -> list[_Weighted]:
    """Build the configured terms; default: the task's own grader."""
    if not reward.terms:
        return [_Weighted("task", 1.0, TaskTerm(task=task))]
    found: list[_Weighted] = []
    for table in reward.terms:
        try:
            term = table.build()
            term.check(max_tokens=max_tokens)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"[[reward.terms]] can't be used: {error}") from error
        if isinstance(term, TaskTerm):
            term = TaskTerm(task=task)
        if isinstance(term, OverlongTerm) and term.max_tokens is None:
            term = replace(term, max_tokens=max_tokens)
        if isinstance(term, JudgeTerm) and term.cache is None and folder is not None:
            term = replace(term, cache=str(folder / JUDGE_FOLDER))
        found.append(_Weighted(table.part, table.weight, term))
    return found


def _divide(terms: Sequence[_Weighted]) -> tuple[PooledTerms, PooledTerms]:
    """Return the terms that are graded in this process, and those for the pool."""
    single = [(w.label, w.term) for w in terms if isinstance(w.term, Term)]
    local = tuple(pair for pair in single if pair[1].runs_in_process)
    return PooledTerms(local), PooledTerms(tuple(pair for pair in single if pair not in local))


def _named(label: str, outcome: Outcome) -> Outcome:
    """Return the outcome with the term's label, in the format of `PooledTerms`."""
    if outcome.status is GradeStatus.GRADED:
        return replace(outcome, value={label: outcome.value})
    return replace(outcome, reason=f"{label}: {outcome.reason}")


def rewards_of(groups: Sequence[RolloutGroup]) -> Tensor:
    """Return the rewards [groups, samples] in float64, NaN for ungraded samples."""
    rows = [[grade.reward for grade in group.grades] for group in groups]
    return torch.tensor(rows, dtype=torch.float64)


class GroupScorer(Protocol):
    """Grades every completion, in this process or elsewhere."""

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a grade for every completion."""
        ...

    def close(self) -> None:
        """End all grading processes."""
        ...


class SharedScorer:
    """Grades on rank 0 and broadcasts the grades: graders may be random. Collective."""

    def __init__(self, own: GroupScorer) -> None:
        self.own = own

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with the grades of rank 0."""
        return on_rank_zero(lambda: self.own.score(groups))

    def close(self) -> None:
        """End the grading processes of this rank."""
        self.own.close()
