"""[rollout] and [[rollout.policies]]: how completions are sampled."""

from decimal import Decimal
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trustbatch.rollout.registry import DEFAULT_ENGINE, engine_names, engine_tables
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.utils.tables import Changeable, Table

MAX_TURNS = 8


class SecondPolicyConfig(Table):
    """[[rollout.policies]]: another, frozen model that samples a share of the completions."""

    model: str
    """a local folder with a Hugging Face checkpoint, or a model name on the hub"""
    share: float = Field(ge=0.0, le=1.0)
    """of each group's samples, exact in the long run"""
    name: str | None = Field(default=None, min_length=1)
    """of the policy in provenance and metrics; default: the model's name"""
    temperature: float | None = Field(default=None, ge=0.01, le=100.0)
    """default: the rollout's, like top_p and top_k"""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    precision: Literal["auto", "float32", "bfloat16"] | None = None
    """of matrix products; default: the trained model's"""
    trust_remote_code: bool = False
    """run code that comes with this checkpoint"""

    @property
    def policy_name(self) -> str:
        """The name that its completions carry."""
        return self.name or self.model


class RolloutConfig(Table):
    """[rollout]: how completions are sampled."""

    engine: str = DEFAULT_ENGINE
    prompts_per_step: int = Field(default=32, ge=1)
    samples_per_prompt: int = Field(default=8, ge=1)
    max_tokens: int = Field(default=256, ge=1)
    """longest completion; of an episode, with the environment's tokens"""
    max_turns: int = Field(default=MAX_TURNS, ge=1)
    """turns of the policy in an episode, where the task is an environment"""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token"""
    top_logprobs: int = Field(default=0, ge=0)
    """most likely tokens recorded at each position; default: 16 if the objective uses them"""
    logprob_mode: Literal["processed", "raw"] = "processed"
    """"raw" reproduces systems that store untempered, untruncated log-probs"""
    lag: int = Field(default=0, ge=0)
    """train on rollouts that are this many policy versions old"""
    dynamic_sampling: bool = False
    """replace groups of equal rewards by new prompts"""
    max_sampling_rounds: int = Field(default=10, ge=1)
    """batches sampled for one step at most, with dynamic sampling"""
    max_sequences: Changeable[int] = Field(default=512, ge=1)
    """sequences decoded at a time"""
    prompts_per_call: Changeable[int | None] = Field(default=None, ge=1)
    """prompts per call of an engine; default: all, or an equal share for each engine"""
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """of the engine's matrix products; "auto" is the policy's"""
    kv_precision: Literal["auto", "fp8"] = "auto"
    """of keys and values in the engine's cache; "auto" is that of its matrix products"""
    canary_every: Changeable[int | None] = Field(default=None, ge=0)
    """weight updates between two comparisons of engine and trainer; 0 is never"""
    policies: tuple[SecondPolicyConfig, ...] = ()
    """other models that sample a share of the completions"""
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _check(self) -> "RolloutConfig":
        # as decimals, so that 0.6 + 0.3 + 0.1 is 1
        total = sum(Decimal(str(policy.share)) for policy in self.policies)
        if total > 1:
            raise ValueError(
                f"rollout.policies has shares that add up to {total}: lower them to 1 in all"
            )
        names = [policy.policy_name for policy in self.policies]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"rollout.policies has two called {name!r}: give each a name of its own"
                )
        for engine, name in engine_tables().items():
            table = getattr(self, name)
            if engine != self.engine and table != type(table)():
                raise ValueError(
                    f'rollout.{name} requires rollout.engine = "{engine}", not "{self.engine}": '
                    "set that, or remove the table"
                )
        return self

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: str) -> str:
        if value not in engine_names():
            known = " or ".join(f'"{name}"' for name in engine_names())
            raise ValueError(f'rollout.engine = "{value}" is not known: set it to {known}')
        return value
