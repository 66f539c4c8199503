"""`trustbatch eval`: evaluates models on tasks, into folders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trustbatch.config import Config, parse_config
from trustbatch.errors import ConfigError
from trustbatch.evaluation.folder import EvaluationFolder
from trustbatch.evaluation.models import (
    LoadModel,
    ModelCache,
    completion_space,
    locate_model,
    short_names,
    weights_digest,
)
from trustbatch.evaluation.results import EvaluationResults
from trustbatch.evaluation.sampling import EvaluationProgress, sample_records
from trustbatch.evaluation.settings import Evaluation, recorded_settings
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import describe_environment
from trustbatch.rewards import Scorer
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.registry import engine_info
from trustbatch.tasks.base import close_task
from trustbatch.utils.terminal import LiveLine

OpenEngine = Callable[[Config, Policy], RolloutEngine]
MAX_SEQUENCES = {"cuda": 512, "cpu": 64}
"""default number of sequences decoded at a time: more of them lose more work at a kill"""


@dataclass(frozen=True)
class EvaluatedModel:
    """The results of one model, and their folder."""

    folder: Path
    results: EvaluationResults


class ModelEvaluator:
    """Evaluates models one after another; finished problems of an earlier start are skipped.

    The two functions load a model and open an engine as a configuration describes them.
    """

    def __init__(self, *, load_model: LoadModel, open_engine: OpenEngine) -> None:
        self._models = ModelCache(load_model)
        self._open_engine = open_engine

    def evaluate_models(
        self, models: Sequence[str], evaluation: Evaluation
    ) -> list[EvaluatedModel]:
        """Evaluate each model into its own folder below `evaluation.output`."""
        engine_info(evaluation.engine).require()
        located = [locate_model(model) for model in models]
        names = short_names(located)
        evaluation = self._fitted(located, evaluation)
        tasks = "+".join(task.name for task in evaluation.suite)
        return [
            self._evaluate(evaluation.output / f"{name}-{tasks}", model, name, evaluation)
            for model, name in zip(located, names, strict=True)
        ]

    def evaluate_into(
        self, path: Path, *, model: str, name: str, evaluation: Evaluation
    ) -> EvaluatedModel:
        """Evaluate one model, called `name` in the results, into the folder `path`."""
        return self._evaluate(path, model, name, self._fitted([model], evaluation))

    def _fitted(self, models: Sequence[str], evaluation: Evaluation) -> Evaluation:
        """Lower max_tokens to what fits the context of every model, so that they are comparable.

        An explicit max_tokens that does not fit is refused before the first model is evaluated.
        """
        for model in models:
            policy = self._models.load(_engine_config(model, evaluation))
            space, longest = completion_space(policy, evaluation.suite)
            sampling = evaluation.sampling
            if space >= sampling.max_tokens:
                continue
            why = (
                f"the context of {model} has {policy.context_length:,} tokens, and the longest "
                f"prompt {longest:,}"
            )
            if not evaluation.is_capped:
                raise ConfigError(
                    f"--max-tokens {sampling.max_tokens} does not fit: {why}; give at most {space}."
                )
            LiveLine().warn(
                f"At most {space:,} tokens are sampled, not {sampling.max_tokens:,}: {why}.",
            )
            evaluation = replace(evaluation, sampling=replace(sampling, max_tokens=space))
        return evaluation

    def _evaluate(
        self, path: Path, model: str, name: str, evaluation: Evaluation
    ) -> EvaluatedModel:
        config = _engine_config(model, evaluation)
        policy = self._models.load(config)
        settings = recorded_settings(
            evaluation.sampling,
            evaluation.suite,
            config.rollout,
            policy,
            max_sequences=config.rollout.max_sequences,
        )
        settings["weights"] = weights_digest(policy)
        folder = EvaluationFolder(path, model=name, settings=settings)
        try:
            if any(len(folder.done(task.name)) < len(task.problems) for task in evaluation.suite):
                self._sample(config, policy, evaluation, folder)
            results = folder.finish(evaluation.suite, describe_environment())
        finally:
            folder.close()
        return EvaluatedModel(folder.path, results)

    def _sample(
        self, config: Config, policy: Policy, evaluation: Evaluation, folder: EvaluationFolder
    ) -> None:
        """Sample and grade the problems that are not in the folder yet."""
        total = sum(len(task.problems) for task in evaluation.suite)
        progress = EvaluationProgress(folder.model, total, done=len(folder.outcomes))
        progress.start()
        engine = self._open_engine(config, policy)
        try:
            for task in evaluation.suite:
                scorer = Scorer(task.task, config.reward.limits)
                try:
                    for records in sample_records(
                        engine,
                        policy,
                        scorer,
                        task,
                        evaluation.sampling,
                        max_sequences=config.rollout.max_sequences,
                        max_turns=config.rollout.max_turns,
                        done=folder.done(task.name),
                    ):
                        progress.update([folder.add(record) for record in records])
                finally:
                    scorer.close()
                    close_task(task.task)
        finally:
            engine.close()


def _engine_config(model: str, evaluation: Evaluation) -> Config:
    """Return a configuration of engine and graders; its other tables are not used."""
    on_gpu = torch.cuda.is_available()
    rollout = {
        "max_sequences": MAX_SEQUENCES["cuda" if on_gpu else "cpu"],
        **evaluation.tables.get("rollout", {}),
        "engine": evaluation.engine,
    }
    return parse_config(
        {
            "seed": evaluation.sampling.seed,
            "model": {**evaluation.tables.get("model", {}), "name": model},
            "task": {"name": "arithmetic"},
            "objective": {"name": "reinforce"},
            "rollout": rollout,
            "reward": evaluation.tables.get("reward", {}),
        }
    )
