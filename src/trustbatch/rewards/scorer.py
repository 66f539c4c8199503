"""Scoring: from completions to a grade each.

A grader that fails is a fault of the grader, not of the answer: the completion gets a status and
a reason, and never reward 0. `reward.ungraded` says what becomes of it, and `reward.truncated` what
becomes of a completion that was cut: its end is missing, which is no fault of any grader.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trustbatch.errors import ConfigError, RewardError
from trustbatch.rewards.config import RewardConfig
from trustbatch.rewards.pool import GraderPool, NotPortable
from trustbatch.rewards.term import BatchTerm, Sample, Term
from trustbatch.rewards.terms import (
    BatchFunctionTerm,
    HttpTerm,
    OverlongTerm,
    PooledTerms,
    TaskTerm,
)
from trustbatch.rewards.worker import Outcome, describe, graded
from trustbatch.tasks.base import Task
from trustbatch.types import FinishReason, Grade, GradeStatus, RolloutGroup

logger = logging.getLogger(__name__)

MAX_UNGRADED_BATCHES = 3
"""so many batches in a row without a single grade end the run"""

_LEFT_OUT = Grade.failed(GradeStatus.TRUNCATED, 'it was cut, and reward.truncated is "leave_out"')


@dataclass(frozen=True, slots=True)
class _Weighted:
    label: str
    weight: float
    term: Term | BatchTerm


class Scorer:
    """Grades the completions of a task's prompts by the terms of [reward]."""

    def __init__(
        self, task: Task, reward: RewardConfig | None = None, *, max_tokens: int | None = None
    ) -> None:
        self.task = task
        self.reward = RewardConfig() if reward is None else reward
        self._terms = _build_terms(task, self.reward, max_tokens)
        self._pools: dict[str, GraderPool] = {}
        self._graded_here: set[str] = set()
        self._ungraded_batches = 0

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups with a grade for every completion."""
        graded_groups = self.grade(groups)
        self.report(graded_groups)
        return graded_groups

    def grade(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Grade every completion, and leave it to `report` to say what could not be graded.

        Where `reward.truncated` leaves out what was cut, no term sees it: a function of the whole
        batch compares the others alone.
        """
        samples = [sample for sample in _samples(groups) if not self._is_left_out(sample)]
        rest = iter(self._grades(samples))
        grades = iter(
            _LEFT_OUT if self._is_left_out(sample) else next(rest) for sample in _samples(groups)
        )
        return [
            replace(group, grades=tuple(next(grades) for _ in group.completions))
            for group in groups
        ]

    def prepare(self) -> None:
        """Load what the terms need in a process, to see whether that can be done."""
        _, pooled = _divide(self._terms)
        if pooled.terms:
            self._in_processes("terms", pooled, [], self.reward.time_limit)
        for weighted in self._terms:
            if isinstance(weighted.term, BatchFunctionTerm):
                self._batch(weighted.label, weighted.term, [])

    def report(self, groups: Sequence[RolloutGroup]) -> None:
        """Say what of a graded batch has no grade; stop if that is asked for, or nothing has."""
        self._report(_samples(groups), [grade for group in groups for grade in group.grades])

    @property
    def needs_whole_batches(self) -> bool:
        """Whether a term compares all completions of a batch, so that it can't be divided."""
        return any(isinstance(weighted.term, BatchFunctionTerm) for weighted in self._terms)

    def close(self) -> None:
        """End all grading processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _is_left_out(self, sample: Sample) -> bool:
        return sample.is_cut and self.reward.truncated == "leave_out"

    def _grades(self, samples: Sequence[Sample]) -> list[Grade]:
        """Ask all terms, and add up what they say of each sample."""
        here, pooled = _divide(self._terms)
        columns = [[graded(here, sample) for sample in samples]] if here.terms else []
        if pooled.terms:
            columns.append(self._in_processes("terms", pooled, samples, self.reward.time_limit))
        for weighted in self._terms:
            if isinstance(weighted.term, HttpTerm):
                found = weighted.term.outcomes(samples)
                columns.append([_named(weighted.label, outcome) for outcome in found])
            elif isinstance(weighted.term, BatchFunctionTerm):
                columns.append(self._batch(weighted.label, weighted.term, samples))
        return [self._grade(row) for row in zip(*columns, strict=True)]

    def _batch(
        self, label: str, term: BatchFunctionTerm, samples: Sequence[Sample]
    ) -> list[Outcome]:
        batches = [list(samples)] if samples else []
        found = self._in_processes(f"batch:{label}", term, batches, term.time_limit)
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
        self,
        name: str,
        grade: PooledTerms | BatchFunctionTerm,
        items: Sequence[Any],
        time_limit: float,
    ) -> list[Outcome]:
        """Grade in the processes of a pool, or here where the grader can't be sent to any."""
        if name not in self._graded_here:
            try:
                if name not in self._pools:
                    self._pools[name] = GraderPool(
                        grade,
                        workers=self.reward.workers or os.cpu_count() or 1,
                        time_limit=time_limit,
                        memory_limit_gib=self.reward.memory_limit_gib,
                        limit_name=(
                            "reward.time_limit"
                            if isinstance(grade, PooledTerms)
                            else f"time_limit of the term {name.removeprefix('batch:')}"
                        ),
                    )
                if not items:
                    self._pools[name].prepare()
                return self._pools[name].run(items)
            except NotPortable as error:
                self._graded_here.add(name)
                pool = self._pools.pop(name, None)
                if pool is not None:
                    pool.close()
                self._load_here(grade)
                logger.warning(
                    "The grader of task %s can't be sent to another process (%s): it runs in this "
                    "one, without limits of time and memory; define it in a module to have them.",
                    self.task.name,
                    error,
                )
        return [graded(grade, item) for item in items]

    def _load_here(self, grade: PooledTerms | BatchFunctionTerm) -> None:
        """Load what could not be loaded elsewhere; a function that is broken is so here, too."""
        try:
            grade.prepare()
        except Exception as error:  # whatever an import of a user's module raises
            raise RewardError(
                f"The reward of task {self.task.name} can't be loaded ({describe(error)}): fix it, "
                "and the same command continues the run."
            ) from error

    def _grade(self, row: Sequence[Outcome]) -> Grade:
        """Add the weighted parts, or say why one is missing."""
        for outcome in row:
            if outcome.status is not GradeStatus.GRADED:
                return self._ungraded(outcome.status, outcome.reason)
        parts = {label: value for outcome in row for label, value in outcome.value.items()}
        reward = sum(weighted.weight * parts[weighted.label] for weighted in self._terms)
        if not math.isfinite(reward):
            return self._ungraded(GradeStatus.FAILED, f"the weighted sum of {parts} is {reward}")
        return Grade(reward=reward, parts=parts if self.reward.terms else {})

    def _ungraded(self, status: GradeStatus, reason: str) -> Grade:
        reward = self.reward.ungraded
        return Grade(
            reward=math.nan if isinstance(reward, str) else reward, status=status, reason=reason
        )

    def _report(self, samples: Sequence[Sample], grades: Sequence[Grade]) -> None:
        """Say what was not graded, and stop where that is asked for or nothing is graded."""
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
                'in the last one all were cut, which reward.truncated = "leave_out" leaves out: '
                'raise rollout.max_tokens, or set reward.truncated = "grade".'
            )
        raise RewardError(
            f"No completion of the last {self._ungraded_batches} batches could be graded, the "
            f"last of {_first(failed)}; fix the grader, and the same command continues the run."
        )

    def _report_failed(self, failed: Sequence[tuple[Sample, Grade]], num_samples: int) -> None:
        if self.reward.ungraded == "stop":
            raise RewardError(
                f"The grader of task {self.task.name} failed on {_first(failed)}; fix it, and the "
                "same command continues the run."
            )
        logger.warning(
            "%d of %d completions could not be graded; the first is of %s",
            len(failed),
            num_samples,
            _first(failed),
        )


def _first(failed: Sequence[tuple[Sample, Grade]]) -> str:
    """Name the prompt of the first completion that a grader failed on, and the reason."""
    sample, grade = failed[0]
    return f"prompt {sample.prompt.id!r}: {grade.reason}"


def _samples(groups: Sequence[RolloutGroup]) -> list[Sample]:
    return [
        Sample(
            prompt=group.prompt,
            completion=completion.text,
            num_tokens=len(completion.token_ids),
            turns=completion.turns,
            is_cut=completion.finish_reason is FinishReason.LENGTH,
        )
        for group in groups
        for completion in group.completions
    ]


def _build_terms(task: Task, reward: RewardConfig, max_tokens: int | None) -> list[_Weighted]:
    """Build the configured terms, or the task's own grader alone."""
    if not reward.terms:
        return [_Weighted("task", 1.0, TaskTerm(task=task))]
    found: list[_Weighted] = []
    for table in reward.terms:
        try:
            term = table.build()
            term.check(max_tokens=max_tokens)
        except ValueError as error:
            raise ConfigError(f"[[reward.terms]] can't be used: {error}") from error
        if isinstance(term, TaskTerm):
            term = TaskTerm(task=task)
        if isinstance(term, OverlongTerm) and term.max_tokens is None:
            term = replace(term, max_tokens=max_tokens)
        found.append(_Weighted(table.part, table.weight, term))
    return found


def _divide(terms: Sequence[_Weighted]) -> tuple[PooledTerms, PooledTerms]:
    """Return the terms that are graded in this process, and those for the pool."""
    single = [(w.label, w.term) for w in terms if isinstance(w.term, Term)]
    here = tuple(pair for pair in single if pair[1].runs_here)
    return PooledTerms(here), PooledTerms(tuple(pair for pair in single if pair not in here))


def _named(label: str, outcome: Outcome) -> Outcome:
    """Give the value its label, as the other terms do, and the reason too."""
    if outcome.status is GradeStatus.GRADED:
        return replace(outcome, value={label: outcome.value})
    return replace(outcome, reason=f"{label}: {outcome.reason}")
