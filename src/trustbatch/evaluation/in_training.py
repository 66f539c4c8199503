"""Evaluation during training, with the run's own engine.

Samples are pure functions of their prompt ids, which differ from those of the rollouts, so a run is
the same with and without evaluation.
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
from trustbatch.evaluation.results import ProblemOutcome, score_tasks
from trustbatch.evaluation.sampling import EvaluationProgress, sample_records
from trustbatch.evaluation.settings import SamplingSettings, recorded_settings
from trustbatch.evaluation.statistics import shown_ks
from trustbatch.evaluation.suite import EvaluatedTask, TaskChoice, load_suite
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import RunFolder, describe_environment
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import Scorer
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.tasks.base import close_task
from trustbatch.utils.distributed import num_ranks, this_rank


class InTrainingEvaluation:
    """Evaluates the policy every `evaluation.every` steps. Collective: all ranks call it."""

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
        """of the trained policy, without second policies"""
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
        self._scorers = {task.name: Scorer(task.task, config.reward.limits) for task in self.suite}

    def before_first_step(self, step: int) -> None:
        """Evaluate the initial policy and write its metrics, if no step is done yet."""
        if self.suite and step == 0:
            self.run.write_metrics(0, self._evaluate(0))

    def after_step(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation if one is due after this step."""
        is_due = step % max(self.config.evaluation.every, 1) == 0
        if not self.suite or not (is_due or step == self.config.training.steps):
            return {}
        start = time.perf_counter()
        metrics = self._evaluate(step)
        return metrics | {"time/evaluation_seconds": time.perf_counter() - start}

    def close(self) -> None:
        """End the processes of graders and tasks; the next evaluation restarts them."""
        for scorer in self._scorers.values():
            scorer.close()
        for evaluated in self.suite:
            close_task(evaluated.task)

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
                for records in self._sample(task):
                    new = [ProblemOutcome.of_record(record) for record in records]
                    outcomes[task.name] += new
                    progress.update(new)
                    if folder is not None:
                        for record in records:
                            folder.add(record)
            if folder is not None:
                folder.finish(self.suite, describe_environment())
        finally:
            self.close()  # free CPU and memory until the next evaluation
            if folder is not None:
                folder.close()
        return evaluation_metrics(outcomes)

    def _sample(self, task: EvaluatedTask) -> Iterator[list[dict[str, Any]]]:
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
            shutil.rmtree(path)  # left by a start that was killed before its next checkpoint
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
    """Load the tasks of [evaluation]; none if evaluation is off."""
    if not table.every:
        return []
    choices = [TaskChoice(entry.name, entry.options) for entry in table.suite]
    return load_suite(choices, data=table.data, limit=table.limit, num_endless=table.prompts)


def evaluation_metrics(outcomes: Mapping[str, list[ProblemOutcome]]) -> dict[str, float]:
    """Return the scores as metrics: eval/TASK/pass@1 etc., and eval/average/..."""
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
