"""`trustbatch eval`: models on tasks, with an engine, into folders."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trustbatch.config import Config, parse_config
from trustbatch.engines import build_engine
from trustbatch.errors import ConfigError
from trustbatch.evaluation.folder import EvaluationFolder
from trustbatch.evaluation.models import (
    locate_model,
    room_for_answers,
    short_names,
    weights_digest,
)
from trustbatch.evaluation.progress import EvaluationProgress
from trustbatch.evaluation.results import EvaluationResults
from trustbatch.evaluation.sample import sample_records
from trustbatch.evaluation.settings import SamplingSettings, recorded_settings
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.models.config import ModelConfig
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import describe_environment
from trustbatch.rewards import Scorer
from trustbatch.rollout.registry import DEFAULT_ENGINE, engine_info
from trustbatch.session import load_model
from trustbatch.utils.terminal import LiveLine

MAX_SEQUENCES = {"cuda": 512, "cpu": 64}
"""sequences decoded at a time, unless told: the more, the more is lost in a kill"""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is asked of every model."""

    suite: Sequence[EvaluatedTask]
    sampling: SamplingSettings
    is_capped: bool = True
    """whether max_tokens gives way to the model's context; if not, what does not fit is refused"""
    engine: str = DEFAULT_ENGINE
    tables: Mapping[str, Any] = field(default_factory=dict)
    """keys of [model], [rollout] and [reward] that say where and how it is sampled and graded"""
    output: Path = Path("evals")


@dataclass(frozen=True)
class EvaluatedModel:
    """One model's results, and where they are."""

    folder: Path
    results: EvaluationResults


def evaluate_models(models: Sequence[str], evaluation: Evaluation) -> list[EvaluatedModel]:
    """Evaluate one model after the other; what an earlier start has done is not done again."""
    engine_info(evaluation.engine).require()
    located = [locate_model(model) for model in models]
    names = short_names(located)
    loader = _Loader()
    evaluation = _fitted(located, evaluation, loader)
    return [
        _evaluate(model, name, evaluation, loader)
        for model, name in zip(located, names, strict=True)
    ]


class _Loader:
    """Holds one model at a time: the one that was asked for last."""

    def __init__(self) -> None:
        self._loaded: tuple[ModelConfig, Policy] | None = None

    def load(self, config: Config) -> Policy:
        if self._loaded is None or self._loaded[0] != config.model:
            self._loaded = None
            gc.collect()  # the next one needs the room
            self._loaded = config.model, load_model(config).freeze()
        return self._loaded[1]


def _engine_config(model: str, evaluation: Evaluation) -> Config:
    """Return a configuration of the engine and the graders; nothing else of it is used."""
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


def _fitted(models: Sequence[str], evaluation: Evaluation, loader: _Loader) -> Evaluation:
    """Lower max_tokens to what fits the context of every model, so that they can be compared.

    One that was asked for is refused, before the first model is evaluated.
    """
    for model in models:
        policy = loader.load(_engine_config(model, evaluation))
        room, longest = room_for_answers(policy, evaluation.suite)
        sampling = evaluation.sampling
        if room >= sampling.max_tokens:
            continue
        why = (
            f"the context of {model} has {policy.context_length:,} tokens, and the longest prompt "
            f"{longest:,}"
        )
        if not evaluation.is_capped:
            raise ConfigError(
                f"--max-tokens {sampling.max_tokens} does not fit: {why}; give at most {room}."
            )
        LiveLine().show(
            f"At most {room:,} tokens are sampled, not {sampling.max_tokens:,}: {why}.", last=True
        )
        evaluation = replace(evaluation, sampling=replace(sampling, max_tokens=room))
    return evaluation


def _evaluate(model: str, name: str, evaluation: Evaluation, loader: _Loader) -> EvaluatedModel:
    tasks = "+".join(task.name for task in evaluation.suite)
    return _evaluate_in(evaluation.output / f"{name}-{tasks}", model, name, evaluation, loader)


def evaluate_into(path: Path, *, model: str, name: str, evaluation: Evaluation) -> EvaluatedModel:
    """Evaluate one model, called `name`, into a folder of one's choice."""
    loader = _Loader()
    return _evaluate_in(path, model, name, _fitted([model], evaluation, loader), loader)


def _evaluate_in(
    path: Path, model: str, name: str, evaluation: Evaluation, loader: _Loader
) -> EvaluatedModel:
    config = _engine_config(model, evaluation)
    policy = loader.load(config)
    folder = EvaluationFolder(
        path,
        model=name,
        settings=recorded_settings(
            evaluation.sampling,
            evaluation.suite,
            config.rollout,
            policy,
            max_sequences=config.rollout.max_sequences,
        )
        | {"weights": weights_digest(policy)},
    )
    try:
        if any(len(folder.done(task.name)) < len(task.problems) for task in evaluation.suite):
            _sample(config, policy, evaluation, folder)
        results = folder.finish(evaluation.suite, describe_environment())
    finally:
        folder.close()
    return EvaluatedModel(folder.path, results)


def _sample(
    config: Config, policy: Policy, evaluation: Evaluation, folder: EvaluationFolder
) -> None:
    """Sample and grade what the folder does not have yet."""
    total = sum(len(task.problems) for task in evaluation.suite)
    progress = EvaluationProgress(folder.model, total, done=len(folder.outcomes))
    progress.start()
    engine = build_engine(config, policy)
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
    finally:
        engine.close()
