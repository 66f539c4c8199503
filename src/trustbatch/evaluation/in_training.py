"""Evaluation within a run, on its own engine: the curve that tells whether training helps.

Samples are pure functions of their ids, which the run's rollouts do not share, so a run is the same
with and without it.
"""

import io
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trustbatch.config import Config
from trustbatch.config.evaluation import EvaluationConfig
from trustbatch.evaluation.folder import EvaluationFolder
from trustbatch.evaluation.outcomes import ProblemOutcome
from trustbatch.evaluation.pass_at_k import shown_ks
from trustbatch.evaluation.progress import EvaluationProgress
from trustbatch.evaluation.sample import sample_records
from trustbatch.evaluation.scores import score_tasks
from trustbatch.evaluation.settings import SamplingSettings, recorded_settings
from trustbatch.evaluation.suite import EvaluatedTask, TaskChoice, load_suite
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import RunFolder, describe_environment
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import Scorer
from trustbatch.rollout.collect import encode_checked
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.utils.distributed import num_ranks, this_rank


class InTrainingEvaluation:
    """Evaluates the policy every so many steps; with several ranks all of them call it."""

    def __init__(
        self,
        config: Config,
        suite: list[EvaluatedTask],
        policy: Policy,
        engine: RolloutEngine,
        run: RunFolder,
    ) -> None:
        self.config = config
        self.policy = policy
        self.engine = engine
        """of the trained policy alone"""
        self.run = run
        table = config.evaluation
        self.sampling = SamplingSettings(
            samples=table.samples,
            temperature=table.temperature,
            top_p=table.top_p,
            max_tokens=table.max_tokens or config.rollout.max_tokens,
            seed=config.seed,
        )
        self.suite = suite
        for task in self.suite:
            for problem in task.problems:  # now, not after hours of training
                encode_checked(policy, problem, self.sampling.max_tokens)
        self._scorers = {task.name: Scorer(task.task, config.reward.limits) for task in self.suite}

    def before_first_step(self, step: int) -> None:
        """Write how good the policy is before it is trained, if it has not been trained yet."""
        if self.suite and step == 0:
            self.run.write_metrics(0, self._evaluate(0))

    def after_step(self, step: int) -> dict[str, float]:
        """Return the scores of the policy after a step, where they are due."""
        is_due = step % max(self.config.evaluation.every, 1) == 0
        if not self.suite or not (is_due or step == self.config.training.steps):
            return {}
        start = time.perf_counter()
        metrics = self._evaluate(step)
        return metrics | {"time/evaluation_seconds": time.perf_counter() - start}

    def close(self) -> None:
        """End the graders' processes; they come back where they are needed."""
        for scorer in self._scorers.values():
            scorer.close()

    def _evaluate(self, step: int) -> dict[str, float]:
        folder = self._open_folder(step) if this_rank() == 0 else None
        outcomes: dict[str, list[ProblemOutcome]] = {}
        try:
            progress = EvaluationProgress(
                f"{self.config.run.name}  evaluation at step {step}",
                sum(len(task.problems) for task in self.suite),
                stream=sys.stderr if this_rank() == 0 else io.StringIO(),
            )
            for task in self.suite:
                outcomes[task.name] = []
                for records in self._sampled(task):
                    new = [ProblemOutcome.of_record(record) for record in records]
                    outcomes[task.name] += new
                    progress.update(new)
                    if folder is not None:
                        for record in records:
                            folder.add(record)
            if folder is not None:
                folder.finish(self.suite, describe_environment())
        finally:
            self.close()  # the machine is the run's until the next time
            if folder is not None:
                folder.close()
        return evaluation_metrics(outcomes)

    def _sampled(self, task: EvaluatedTask) -> Iterator[list[dict[str, Any]]]:
        with memory_advice(self.config, task.task, "generate"):
            yield from sample_records(
                self.engine,
                self.policy,
                self._scorers[task.name],
                task,
                self.sampling,
                max_sequences=self._max_sequences,
                max_turns=self.config.rollout.max_turns,
            )

    @property
    def _max_sequences(self) -> int:
        cluster = self.config.cluster
        num_engines = num_ranks() if cluster is None else cluster.engines
        return self.config.rollout.max_sequences * num_engines

    def _open_folder(self, step: int) -> EvaluationFolder:
        path: Path = self.run.path / "evaluations" / f"step-{step:06d}"
        if path.is_dir():
            shutil.rmtree(path)  # of a start that was killed before its next checkpoint
        return EvaluationFolder(
            path,
            model=f"{self.config.run.name}-step-{step}",
            settings=recorded_settings(
                self.sampling,
                self.suite,
                self.config.rollout,
                self.policy,
                max_sequences=self._max_sequences,
            ),
        )


def configured_suite(table: EvaluationConfig) -> list[EvaluatedTask]:
    """Load the tasks that [evaluation] names; none where nothing is evaluated."""
    if not table.every:
        return []
    choices = [TaskChoice(entry.name, entry.options) for entry in table.suite]
    return load_suite(choices, data=table.data, limit=table.limit, num_endless=table.prompts)


def evaluation_metrics(outcomes: Mapping[str, list[ProblemOutcome]]) -> dict[str, float]:
    """Return the scores as metrics: eval/TASK/pass@1 and so on, and eval/average/..."""
    metrics: dict[str, float] = {}
    for scores in score_tasks(outcomes):
        prefix = f"eval/{scores.name}"
        for k in shown_ks(scores.num_samples):
            score = scores.at(k)
            if score is not None:
                metrics[f"{prefix}/pass@{k}"] = score.value
                if k == 1:
                    metrics[f"{prefix}/pass@1_low"] = score.low
                    metrics[f"{prefix}/pass@1_high"] = score.high
        metrics[f"{prefix}/truncated_fraction"] = scores.truncated_fraction
        metrics[f"{prefix}/ungraded"] = float(scores.num_ungraded)
        metrics[f"{prefix}/mean_tokens"] = scores.mean_tokens
    return metrics
