"""The configuration of a run: one tree of tables, and the checks between tables."""

from collections.abc import Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError, model_validator

from trustbatch.config.cluster import ClusterConfig
from trustbatch.config.evaluation import EvaluationConfig
from trustbatch.config.objective import (
    DEFAULT_OBJECTIVE,
    TRUNCATED_DEFAULT,
    AdvantageConfig,
    ObjectiveConfig,
)
from trustbatch.models.config import ModelConfig
from trustbatch.observe.config import RunConfig
from trustbatch.rewards.config import RewardConfig
from trustbatch.rollout.config import RolloutConfig
from trustbatch.rollout.registry import engine_info, engine_names, engine_tables
from trustbatch.tasks.config import TaskConfig
from trustbatch.training.config import TrainingConfig
from trustbatch.utils.tables import Table

DEFAULT_TOP_LOGPROBS = 16
SHARED_CANARY_EVERY = 10


class Config(Table):
    """The whole configuration of a training run."""

    seed: int = 0
    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig | None = None
    """default: generation and training take turns in one process"""
    run: RunConfig = RunConfig()

    @model_validator(mode="before")
    @classmethod
    def _resolve_objective(cls, data: Any) -> Any:
        """Choose the objective where none is named, and have engines record what it uses."""
        if not isinstance(data, Mapping):
            return data
        data = {key: _as_dict(value) for key, value in data.items()}
        rollout = data.setdefault("rollout", {})
        named = data.setdefault("objective", {})
        if isinstance(named, dict) and isinstance(rollout, dict):
            # what is not a number is reported with all other problems
            is_truncated = rollout.get("top_p", 1.0) != 1.0 or rollout.get("top_k", 0) != 0
            named.setdefault("name", TRUNCATED_DEFAULT if is_truncated else DEFAULT_OBJECTIVE)
        try:
            objective = ObjectiveConfig.model_validate(named)
        except ValidationError:
            return data  # reported with all other problems
        if isinstance(rollout, dict):
            if objective.resolved(has_top_logp=True).build().needs_top_logp:
                rollout.setdefault("top_logprobs", DEFAULT_TOP_LOGPROBS)
            has_top_logp = bool(rollout.get("top_logprobs"))
            data["objective"] = objective.resolved(has_top_logp=has_top_logp)
        return data

    @model_validator(mode="after")
    def _check(self) -> "Config":
        objective = self.objective.build()
        if self.rollout.samples_per_prompt == 1:
            raise ValueError(
                f"rollout.samples_per_prompt = 1 leaves advantage.name = {self.advantage.name} "
                "nothing to compare a sample with: set it to 2 or more"
            )
        if objective.needs_top_logp and self.rollout.top_logprobs == 0:
            raise ValueError(
                'objective.kl = "top_k" requires rollout.top_logprobs above 0, such as 16'
            )
        if self.training.reference_model is not None and not objective.reference_kl_coef:
            raise ValueError(
                "training.reference_model requires objective.reference_kl_coef above 0: set it, or "
                "remove the model"
            )
        if self.model.name in [policy.policy_name for policy in self.rollout.policies]:
            raise ValueError(
                f"rollout.policies has one called {self.model.name!r}, as the trained model: give "
                "it a name of its own"
            )
        num_sequences = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.training.mini_batches > num_sequences:
            raise ValueError(
                f"training.mini_batches = {self.training.mini_batches} is more than the "
                f"{num_sequences} sequences of a step: lower it"
            )
        if self.cluster is not None:
            self._check_cluster(self.cluster)
        return self

    def _check_cluster(self, cluster: ClusterConfig) -> None:
        if self.rollout.lag:
            raise ValueError(
                "rollout.lag is for runs without [cluster]: set cluster.max_lag in its place"
            )
        least = 2 * cluster.reuse - 1
        if self.rollout.dynamic_sampling and cluster.max_lag < least:
            raise ValueError(
                "rollout.dynamic_sampling keeps groups for the next batch, when they are older: "
                f"set cluster.max_lag to {least} at least, or to more for generation to run beside "
                "training"
            )
        if cluster.in_flight:
            self._check_in_flight(cluster)

    def _check_in_flight(self, cluster: ClusterConfig) -> None:
        if not engine_info(self.rollout.engine).supports_in_flight:
            able = [f'"{name}"' for name in engine_names() if engine_info(name).supports_in_flight]
            raise ValueError(
                f'cluster.in_flight is not available with rollout.engine = "{self.rollout.engine}":'
                f" set that to {' or '.join(able)}, or remove cluster.in_flight"
            )
        least = cluster.reuse * (2 if self.rollout.dynamic_sampling else 1)
        if cluster.max_lag < least:
            raise ValueError(
                f"cluster.max_lag = {cluster.max_lag} publishes no version while a batch is "
                f"sampled, as cluster.in_flight requires: set cluster.max_lag to {least} or more, "
                "or remove cluster.in_flight"
            )

    @property
    def policy_temperature(self) -> float:
        """Temperature of the policy that is optimized, as a number."""
        temperature = self.training.policy_temperature
        return self.rollout.temperature if temperature == "rollout" else float(temperature)

    @property
    def anchor_temperature(self) -> float | None:
        """Temperature of the model's log-probs that engines record beside those sampled from.

        None where nothing uses them: no pull of the objective, and no ledger.
        """
        for_ledger = (
            self.run.ledger_every and engine_info(self.rollout.engine).records_anchor_freely
        )
        needs_anchor = for_ledger or self.objective.build().needs_anchor
        return self.policy_temperature if needs_anchor else None

    def version_for(self, batch: int) -> int:
        """Return the version that samples a batch (from 1): the oldest within `max_lag`.

        Groups that dynamic sampling kept from the previous batch are older, and count too.
        """
        assert self.cluster is not None
        sampled_before = self.cluster.reuse if self.rollout.dynamic_sampling else 0
        lag = self.cluster.max_lag - sampled_before
        return max(0, batch * self.cluster.reuse - 1 - lag)

    @property
    def batch_timeout(self) -> float:
        """Deadline of a batch, with all its sampling rounds and restarts of dead processes."""
        assert self.cluster is not None
        num_rounds = self.rollout.max_sampling_rounds if self.rollout.dynamic_sampling else 1
        seconds = self.cluster.start_seconds + self.cluster.generate_seconds
        return num_rounds * (self.cluster.max_restarts + 1) * (seconds + self.cluster.grade_seconds)

    @property
    def checkpoint_timeout(self) -> float:
        """Deadline of all batches that older versions may still sample when a checkpoint is due."""
        assert self.cluster is not None
        return self.batch_timeout * (self.cluster.max_lag + 1)

    @property
    def updates_per_canary(self) -> int:
        """Weight updates per canary: fewer checks for an engine on the trainer's own parameters."""
        if self.rollout.canary_every is not None:
            return self.rollout.canary_every
        shares_parameters = engine_info(self.rollout.engine).shares_parameters
        return SHARED_CANARY_EVERY if shares_parameters and self.cluster is None else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved tree; keys without a value or an effect are left out."""
        tree = self.model_dump(exclude_none=True, mode="json")
        for engine, table in engine_tables().items():
            if engine != self.rollout.engine:
                del tree["rollout"][table]
        if not self.evaluation.every:
            del tree["evaluation"]
        return tree

    def to_toml(self) -> str:
        """Return the resolved tree as TOML."""
        return tomli_w.dumps(self.to_dict())


def _as_dict(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return dict(value) if isinstance(value, Mapping) else value
