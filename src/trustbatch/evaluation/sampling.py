"""Sampling and grading the problems of a task, with a progress line."""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TextIO

from trustbatch.evaluation.results import ProblemOutcome
from trustbatch.evaluation.settings import SamplingSettings
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.models.policy import Policy
from trustbatch.observe.progress import SECONDS_BETWEEN
from trustbatch.rewards import Scorer
from trustbatch.rollout.collect import collect
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import Completion, Grade, Prompt, RolloutGroup
from trustbatch.utils.distributed import on_rank_zero, this_rank
from trustbatch.utils.terminal import LiveLine


def sample_records(
    engine: RolloutEngine,
    policy: Policy,
    scorer: Scorer,
    task: EvaluatedTask,
    settings: SamplingSettings,
    *,
    max_sequences: int,
    max_turns: int,
    done: Collection[str] = (),
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of a few problems at a time; problems in `done` are skipped.

    Batches do not depend on `done`: logits of another batch could round differently and change a
    token. Collective: all ranks call this, and get the same records.
    """
    sampling = settings.params(policy.stop_token_ids)
    problems_per_batch = max(max_sequences // settings.samples, 1)
    for start in range(0, len(task.problems), problems_per_batch):
        problems = task.problems[start : start + problems_per_batch]
        num_new = sum(problem.id not in done for problem in problems)
        if not num_new:
            continue
        if this_rank() == 0:
            scorer.start(num_new * settings.samples)  # they come up while the engine samples
        prompts = [replace(problem, id=task.sampling_id(problem)) for problem in problems]
        groups = collect(
            engine,
            policy,
            prompts,
            task=task.task,
            num_samples=settings.samples,
            sampling=sampling,
            max_turns=max_turns,
        )
        groups = [
            replace(group, prompt=problem)
            for group, problem in zip(groups, problems, strict=True)
            if problem.id not in done
        ]
        graded = on_rank_zero(lambda groups=groups: scorer.score(groups))
        yield [_record(task.name, group) for group in graded]


def _record(task: str, group: RolloutGroup) -> dict[str, Any]:
    prompt: Prompt = group.prompt
    return {
        "task": task,
        "id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "samples": [
            _sample(completion, grade)
            for completion, grade in zip(group.completions, group.grades, strict=True)
        ],
    }


def _sample(completion: Completion, grade: Grade) -> dict[str, Any]:
    return {
        "text": completion.text,
        **({"turns": [turn.to_record() for turn in completion.turns]} if completion.turns else {}),
        "tokens": completion.num_sampled,
        "finish_reason": str(completion.finish_reason),
        "status": str(grade.status),
        "reward": None if math.isnan(grade.reward) else grade.reward,
        **({"reason": grade.reason} if grade.reason else {}),
    }


class EvaluationProgress:
    """Shows finished problems, accuracy and time left; less often if not on a terminal."""

    def __init__(
        self, label: str, total: int, *, done: int = 0, stream: TextIO | None = None
    ) -> None:
        self.label = label
        self.total = total
        self.done = done
        self._done_at_start = done
        self._line = LiveLine(stream)
        self._start = self._shown = time.monotonic()
        self._correct = self._graded = 0

    def start(self) -> None:
        """Show the number of problems."""
        before = f", {self.done} of them done before" if self.done else ""
        self._line.show(f"{self.label}  {self.total} problems{before}", last=not self._line.is_live)

    def update(self, outcomes: Sequence[ProblemOutcome]) -> None:
        """Add finished problems."""
        self.done += len(outcomes)
        self._correct += sum(outcome.correct for outcome in outcomes)
        self._graded += sum(outcome.graded for outcome in outcomes)
        now = time.monotonic()
        is_last = self.done >= self.total
        if self._line.is_live or is_last or now - self._shown >= SECONDS_BETWEEN:
            self._shown = now
            self._line.show(self.text(), last=is_last)

    def text(self) -> str:
        """Return finished problems, the fraction of correct new samples, and the time left."""
        elapsed = time.monotonic() - self._start
        left = elapsed / max(self.done - self._done_at_start, 1) * (self.total - self.done)
        accuracy = f"{self._correct / self._graded:.3f}" if self._graded else "-"
        return (
            f"{self.label}  {self.done}/{self.total} problems  accuracy {accuracy}"
            f"  {int(left) // 60}:{int(left) % 60:02d} left"
        )
