"""The configuration: one tree of tables, checked before anything is loaded.

Defaults < TOML file < dotted overrides. Unknown keys are refused. The resolved tree is written into
the run folder.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trustbatch.errors import ConfigError
from trustbatch.objectives import Objective, build_objective
from trustbatch.rewards.terms import build_term, default_label
from trustbatch.rollout.registry import (
    DEFAULT_ENGINE,
    engine_info,
    engine_names,
    engine_tables,
)

DEFAULT_TOP_LOGPROBS = 16
MAX_TURNS = 8
SHARED_CANARY_EVERY = 10
ALL_LINEAR = "all-linear"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(_Table):
    """[model.lora]: train low-rank adapters beside the model's weights, which stay as they are."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    """what an adapter adds is multiplied by alpha / rank"""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """names of the linear layers that have one; "all-linear" is all but the output head"""
    base_precision: Literal["float32", "bfloat16"] = "float32"
    """in which the weights of those layers are kept"""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> "LoraConfig":
        if not self.targets:
            raise ValueError(
                'model.lora.targets is empty: name layers such as "q_proj", or remove the key'
            )
        return self


class ModelConfig(_Table):
    """[model]: what is trained."""

    name: str
    """a folder with a Hugging Face checkpoint, a .gguf file, "smollm2", or a name on the hub"""
    device: str = "auto"
    """"auto" is the GPU where there is one, else "cpu\""""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of matrix products; parameters are always float32. "auto": bfloat16 on a GPU"""
    trust_remote_code: bool = False
    """run code that comes with the checkpoint"""
    lora: LoraConfig | None = None
    """all of the model is trained unless there is such a table"""


class NamedOptions(BaseModel):
    """A table with a name and the options of what it names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class SecondPolicyConfig(_Table):
    """[[rollout.policies]]: another, frozen model that samples a share of the completions."""

    model: str
    """a local folder with a Hugging Face checkpoint, or a model name on the hub"""
    share: float = Field(ge=0.0, le=1.0)
    """of each group's samples, exact in the long run"""
    name: str | None = Field(default=None, min_length=1)
    """who sampled it, in provenance and metrics; the model's name unless told"""
    temperature: float | None = Field(default=None, ge=0.01, le=100.0)
    """the rollout's unless told, like the next two"""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    precision: Literal["auto", "float32", "bfloat16"] | None = None
    """of matrix products; the trained model's unless told"""
    trust_remote_code: bool = False
    """run code that comes with this checkpoint"""

    @property
    def policy_name(self) -> str:
        """The name that its completions carry."""
        return self.name or self.model


class VllmConfig(_Table):
    """[rollout.vllm]: how vLLM is run; with `rollout.engine = "vllm"` only."""

    mode: Literal["server", "in_process"] = "server"
    """"server" is a process of its own"""
    devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the server, e.g. "1" or "2,3"; this process's unless told"""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one copy of the model"""
    gpu_memory_utilization: float = Field(default=0.4, gt=0.0, le=1.0)
    """share of the GPU's memory (of the machine's on a CPU) that vLLM takes"""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """size of the KV cache, instead of what gpu_memory_utilization leaves for it"""
    weight_transfer: Literal["auto", "direct", "ipc", "shared_memory"] = "auto"
    """how new weights reach vLLM"""
    transfer_folder: str = "/dev/shm"
    """where shared_memory puts them"""
    enforce_eager: bool = False
    """no CUDA graphs: a faster start and slower decoding"""
    max_model_len: int | None = Field(default=None, ge=2)
    """longest prompt and completion together; the model's context unless told"""
    sleep: bool = False
    """give the GPU's memory back while the policy is trained"""
    start_seconds: float = Field(default=900.0, gt=0.0)
    generate_seconds: float = Field(default=3600.0, gt=0.0)
    update_seconds: float = Field(default=300.0, gt=0.0)

    @model_validator(mode="after")
    def _check(self) -> "VllmConfig":
        if self.mode == "in_process":
            if self.tensor_parallel > 1 or self.devices is not None:
                raise ValueError(
                    'rollout.vllm.tensor_parallel and rollout.vllm.devices need mode = "server"'
                )
            if self.weight_transfer in ("ipc", "shared_memory"):
                raise ValueError(
                    f'rollout.vllm.weight_transfer = "{self.weight_transfer}" is between two '
                    'processes: set it to "direct", or set mode = "server"'
                )
        elif self.weight_transfer == "direct":
            raise ValueError(
                'rollout.vllm.weight_transfer = "direct" is within one process: set it to "ipc" or '
                '"shared_memory", or set mode = "in_process"'
            )
        return self


class RolloutConfig(_Table):
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
    """most likely tokens recorded at each position; 16 where the objective needs them"""
    logprob_mode: Literal["processed", "raw"] = "processed"
    """"raw" reproduces systems that store untempered, untruncated log-probs"""
    lag: int = Field(default=0, ge=0)
    """train on rollouts that are this many policy versions old"""
    dynamic_sampling: bool = False
    """replace groups of equal rewards by new prompts"""
    max_sampling_rounds: int = Field(default=10, ge=1)
    """batches sampled for one step at most, with dynamic sampling"""
    max_sequences: int = Field(default=512, ge=1)
    """sequences decoded at a time"""
    prompts_per_call: int | None = Field(default=None, ge=1)
    """prompts in one call of an engine; all, or an equal share for each engine, unless told"""
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """of the engine's matrix products; "auto" is the policy's"""
    canary_every: int | None = Field(default=None, ge=0)
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
                    f'rollout.{name} only applies with rollout.engine = "{engine}", not '
                    f'"{self.engine}": set that, or remove the table'
                )
        return self

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        if value not in engine_names():
            known = " or ".join(f'"{name}"' for name in engine_names())
            raise ValueError(f"rollout.engine = {value!r} is not known: set it to {known}")
        return value


class RewardTermConfig(NamedOptions):
    """[[reward.terms]]: a part of the reward, with the options of what it names."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """the reward is the sum of all parts, each times its weight"""
    label: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """name of the part in metrics; the function's or the term's unless told"""

    @property
    def part(self) -> str:
        """The name of the part."""
        return self.label or default_label(self.name, self.options)

    @model_validator(mode="after")
    def _check(self) -> "RewardTermConfig":
        build_term(self.name, self.options)
        return self


class RewardConfig(_Table):
    """[reward]: from completions to rewards; the task's own grader unless there are terms."""

    terms: tuple[RewardTermConfig, ...] = ()
    """parts that add up to the reward"""
    ungraded: Literal["leave_out", "stop"] | float = "leave_out"
    """what becomes of a completion whose grader fails; a number is its reward"""
    truncated: Literal["grade", "leave_out"] = "grade"
    """what becomes of a completion that was cut for want of room"""
    workers: int | None = Field(default=None, ge=1)
    """grading processes; as many as there are cores unless told"""
    time_limit: float = Field(default=10.0, gt=0.0)
    """seconds for one completion"""
    memory_limit_gib: float = Field(default=2.0, gt=0.0)
    """for one completion, beyond what the grader holds when it is loaded"""

    @property
    def limits(self) -> "RewardConfig":
        """The limits alone, for an evaluation: there the task's grader says what is right."""
        update = {"terms": (), "ungraded": "leave_out", "truncated": "grade"}
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _check(self) -> "RewardConfig":
        parts = [term.part for term in self.terms]
        for part in parts:
            if parts.count(part) > 1:
                raise ValueError(
                    f"reward.terms has two called {part!r}: give each a label of its own"
                )
        return self


class AdvantageConfig(_Table):
    """[advantage]: from rewards to credit."""

    name: Literal["group_standardized", "group_centered", "leave_one_out", "group_quantile"] = (
        "group_standardized"
    )
    epsilon: float | None = Field(default=None, gt=0.0)
    """added to the standard deviation; group_standardized and group_quantile, 1e-6 unless told"""
    quantile: float | None = Field(default=None, gt=0.0, lt=1.0)
    """of the group's rewards, what others are compared with; group_quantile, 0.4 unless told"""

    @property
    def options(self) -> dict[str, float]:
        """Keyword arguments of the advantage function."""
        told = {"epsilon": self.epsilon, "quantile": self.quantile}
        return {name: value for name, value in told.items() if value is not None}

    @model_validator(mode="after")
    def _check(self) -> "AdvantageConfig":
        if self.epsilon is not None and self.name not in ("group_standardized", "group_quantile"):
            raise ValueError(
                "advantage.epsilon belongs to group_standardized and group_quantile only: remove it"
            )
        if self.quantile is not None and self.name != "group_quantile":
            raise ValueError(
                "advantage.quantile belongs to group_quantile only: set advantage.name to that, or "
                "remove it"
            )
        return self


class TrainingConfig(_Table):
    """[training]: how the policy is updated. Defaults are the paper's."""

    steps: int = Field(default=100, ge=1)
    """batches of rollouts to train on"""
    passes: int = Field(default=1, ge=1)
    """passes over each batch of rollouts"""
    mini_batches: int = Field(default=1, ge=1)
    """optimizer steps in a pass"""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """tokens computed in one forward pass; changes memory, not the result"""
    share_prompts: bool = True
    """compute a prompt once for all its samples where that pays; changes speed, not the result"""
    gradient_checkpointing: bool = False
    """compute each layer again in the backward pass: less memory, a third more time"""
    compile: bool = False
    """compile the layers of the model"""
    cpu_offload: bool = False
    """keep parameters, gradients and optimizer state in host memory; with several ranks"""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """"adamw_8bit" keeps its moments in 8 bits"""
    learning_rate: float = Field(default=1e-5, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.01, ge=0.0)
    gradient_clip: float = Field(default=1.0, gt=0.0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    policy_temperature: float | Literal["rollout"] = 1.0
    """the policy is softmax(logits / policy_temperature); "rollout" takes rollout.temperature"""
    reference_model: str | None = None
    """frozen reference for objective.reference_kl_coef; the initial model unless told"""

    @model_validator(mode="after")
    def _check(self) -> "TrainingConfig":
        if self.policy_temperature != "rollout" and not self.policy_temperature > 0:
            raise ValueError("policy_temperature must be above 0 or the word rollout")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError("betas must be two numbers from 0 to below 1")
        return self


class EvaluationConfig(_Table):
    """[evaluation]: how the policy is evaluated while it is trained, which changes nothing."""

    every: int = Field(default=0, ge=0)
    """steps between evaluations, also before the first step and after the last; 0 is never"""
    suite: tuple[str | NamedOptions, ...] = ()
    """tasks by name, files, or tables such as {name = "arithmetic", level = 1}"""
    data: str | None = None
    """folder with NAME.jsonl.gz of each named task"""
    limit: int | None = Field(default=None, ge=1)
    """first problems of each task; all of them unless told"""
    prompts: int = Field(default=256, ge=1)
    """problems of a task without an end"""
    samples: int = Field(default=4, ge=1)
    """of each problem"""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    top_p: float = Field(default=0.95, gt=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)
    """longest completion; rollout.max_tokens unless told"""

    @model_validator(mode="after")
    def _check(self) -> "EvaluationConfig":
        if self.every and not self.suite:
            raise ValueError(
                'evaluation.suite is empty: name tasks such as ["math500"], or remove '
                "evaluation.every"
            )
        if self.suite and not self.every:
            raise ValueError(
                "evaluation.every is not set, so evaluation.suite is never used: set it to a "
                "number of steps"
            )
        return self


class RunConfig(_Table):
    """[run]: where results go. Nothing here changes what is computed."""

    name: str = Field(default="run", pattern=r"^[^/\\]*[^/\\.][^/\\]*$")
    """a plain name, which becomes the folder's"""
    folder: str = "runs"
    checkpoint_every: int = Field(default=50, ge=1)
    """steps between checkpoints; the last step always has one"""
    keep_checkpoints: int = Field(default=2, ge=1)
    rollouts_every: int = Field(default=10, ge=1)
    """steps between samples of completions in rollouts/"""
    rollouts_logged: int = Field(default=16, ge=0)
    """completions in each sample"""

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.folder) / self.name


class ClusterConfig(_Table):
    """[cluster]: generation beside training, in processes of their own, on Ray."""

    engines: int = Field(default=2, ge=1)
    """rollout engines, each with a copy of the policy"""
    trainers: int = Field(default=1, ge=1)
    """processes that train together; a single one is the process that was started"""
    reward_workers: int = Field(default=1, ge=0)
    """processes that grade; 0 grades in the first trainer's process"""
    max_lag: int = Field(default=1, ge=0)
    """policy versions between sampling and training; 0 takes turns, as without a cluster"""
    reuse: int = Field(default=1, ge=1)
    """steps in a row that train on the same batch"""
    in_flight: bool = False
    """let engines take over new versions while they sample: a completion may span several"""
    address: str = ""
    """of an existing Ray cluster; "" starts one that only this machine can reach"""
    engine_gpus: float | None = Field(default=None, ge=0.0)
    """GPUs of an engine; what is there is divided unless told"""
    weight_transfer: Literal["auto", "direct", "shared_memory", "disk"] = "auto"
    """how new weights reach the engines; "auto" is direct between GPUs with room"""
    transfer_folder: str | None = None
    """for weights on disk, seen by all machines; a folder of the run unless told"""
    max_restarts: int = Field(default=3, ge=0)
    """how often in a row the same work may end with the death of its process"""
    start_seconds: float = Field(default=900.0, gt=0.0)
    generate_seconds: float = Field(default=3600.0, gt=0.0)
    grade_seconds: float = Field(default=3600.0, gt=0.0)
    train_seconds: float = Field(default=7200.0, gt=0.0)
    transfer_seconds: float = Field(default=600.0, gt=0.0)

    @model_validator(mode="after")
    def _check(self) -> "ClusterConfig":
        if self.reuse > self.max_lag + 1:
            raise ValueError(
                f"cluster.reuse = {self.reuse} trains on a batch when it is {self.reuse - 1} "
                f"versions old at least: set cluster.max_lag to {self.reuse - 1} or more"
            )
        if self.engine_gpus is not None and self.engine_gpus > 1 and self.engine_gpus % 1:
            raise ValueError(
                f"cluster.engine_gpus = {self.engine_gpus:g} is neither a part of one GPU nor a "
                "whole number of them: round it"
            )
        if self.transfer_folder is not None and self.weight_transfer != "disk":
            raise ValueError(
                'cluster.transfer_folder is of use only with cluster.weight_transfer = "disk": set '
                "that, or remove the folder"
            )
        return self


class Config(_Table):
    """The whole configuration of a training run."""

    seed: int = 0
    model: ModelConfig
    task: NamedOptions
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    objective: NamedOptions = NamedOptions(name="p3o")
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig | None = None
    """generation and training take turns in one process unless there is such a table"""
    run: RunConfig = RunConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Choose the best KL estimate that the engine supplies, and have the engine supply it."""
        if not isinstance(data, Mapping):
            return data
        data = {key: _as_dict(value) for key, value in data.items()}
        objective = data.setdefault("objective", {})
        if not isinstance(objective, dict):
            return data
        if objective.setdefault("name", "p3o") in ("p3o", "two_anchor", "pact"):
            objective.setdefault("kl", "top_k")
            rollout = data.setdefault("rollout", {})
            if objective["kl"] == "top_k" and isinstance(rollout, dict):
                rollout.setdefault("top_logprobs", DEFAULT_TOP_LOGPROBS)
        return data

    @model_validator(mode="after")
    def _check(self) -> "Config":
        objective = self.build_objective()
        if self.rollout.samples_per_prompt == 1:
            raise ValueError(
                f"rollout.samples_per_prompt = 1 leaves advantage.name = {self.advantage.name} "
                "nothing to compare a sample with: sample at least 2 samples a prompt"
            )
        if objective.needs_top_logp and self.rollout.top_logprobs == 0:
            raise ValueError(
                'objective.kl = "top_k" needs rollout.top_logprobs above 0, such as 16'
            )
        if self.training.reference_model is not None and not objective.reference_kl_coef:
            raise ValueError(
                "training.reference_model is of use only with objective.reference_kl_coef above 0: "
                "set it, or remove the model"
            )
        if self.model.name in [policy.policy_name for policy in self.rollout.policies]:
            raise ValueError(
                f"rollout.policies has one called {self.model.name!r}, as the trained model: give "
                "it a name of its own"
            )
        if self.cluster is not None and self.rollout.lag:
            raise ValueError(
                "rollout.lag is for runs without [cluster]: set cluster.max_lag in its place"
            )
        if self.cluster is not None and self.rollout.dynamic_sampling:
            least = 2 * self.cluster.reuse - 1
            if self.cluster.max_lag < least:
                raise ValueError(
                    "rollout.dynamic_sampling keeps groups for the batch after, when they are "
                    f"older: set cluster.max_lag to {least} at least, or to more if generation "
                    "shall run beside training"
                )
        if self.cluster is not None and self.cluster.in_flight:
            self._check_in_flight(self.cluster)
        num_sequences = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.training.mini_batches > num_sequences:
            raise ValueError(
                f"training.mini_batches = {self.training.mini_batches} is more than the "
                f"{num_sequences} sequences of a step: lower it"
            )
        return self

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
                f"cluster.max_lag = {cluster.max_lag} lets no version come out while a batch is "
                f"sampled, which cluster.in_flight is for: set cluster.max_lag to {least} or more, "
                "or remove cluster.in_flight"
            )

    def build_objective(self) -> Objective:
        """Build the objective that [objective] describes."""
        return build_objective(self.objective.name, **self.objective.options)

    @property
    def policy_temperature(self) -> float:
        """Temperature of the policy that is optimized, as a number."""
        temperature = self.training.policy_temperature
        return self.rollout.temperature if temperature == "rollout" else float(temperature)

    @property
    def anchor_temperature(self) -> float | None:
        """Temperature of the distribution that the objective pulls to; None where it does not."""
        return self.policy_temperature if self.build_objective().needs_anchor else None

    def version_for(self, batch: int) -> int:
        """Return which version samples a batch (from 1): the oldest that its last use allows.

        What dynamic sampling has left over of the batch before is older, and must not be too old.
        """
        assert self.cluster is not None
        sampled_before = self.cluster.reuse if self.rollout.dynamic_sampling else 0
        lag = self.cluster.max_lag - sampled_before
        return max(0, batch * self.cluster.reuse - 1 - lag)

    @property
    def batch_seconds(self) -> float:
        """How long a batch may take, with all its rounds and new processes for dead ones."""
        assert self.cluster is not None
        num_rounds = self.rollout.max_sampling_rounds if self.rollout.dynamic_sampling else 1
        seconds = self.cluster.start_seconds + self.cluster.generate_seconds
        return num_rounds * (self.cluster.max_restarts + 1) * (seconds + self.cluster.grade_seconds)

    @property
    def batches_seconds(self) -> float:
        """Likewise all batches that older versions may still sample when a checkpoint is due."""
        assert self.cluster is not None
        return self.batch_seconds * (self.cluster.max_lag + 1)

    @property
    def updates_per_canary(self) -> int:
        """Every update, but seldom for an engine on the trainer's own parameters: none is sent."""
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


def load_config(path: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides such as "--training.steps=10"."""
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        if not file.is_file():
            inside = file / "config.toml"  # a run folder has its own
            hint = f"give {str(inside)!r}" if inside.is_file() else "check the path"
            raise ConfigError(f"There is no configuration file {str(path)!r}: {hint}.")
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key, e.g. "--rollout.temperature=1.2"."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not override.startswith("--") or not equals or not key:
        raise ConfigError(f"{override!r} is not an override: write --table.key=value.")
    *tables, last = key.split(".")
    node: Any = tree
    for number, table in enumerate(tables):
        if isinstance(node, list):
            node = _entry(node, table, ".".join(tables[:number]))
        else:
            node = node.setdefault(table, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"{override!r} treats {table!r} as a table, but it is a value.")
    if isinstance(node, list):
        raise _not_in_list(node, ".".join(tables))
    node[last] = _parse_value(text)


def _entry(tables: list[Any], number: str, key: str) -> Any:
    if not number.isdecimal() or int(number) >= len(tables):
        raise _not_in_list(tables, key)
    return tables[int(number)]


def _not_in_list(tables: list[Any], key: str) -> ConfigError:
    return ConfigError(
        f"{key} is a list of {len(tables)} so far: name one by its number from 0, and a key of it, "
        f"as in --{key}.0.key=value."
    )


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Check a tree of plain values; every problem becomes one sentence that says what to change."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # a key of several types reports each of them: one sentence a key is enough
        sentences = {_key(item["loc"]): _sentence(item) for item in reversed(error.errors())}
        raise ConfigError("\n".join(reversed(sentences.values()))) from None


def _key(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the part of an error's location that is a key: types of a union may follow it."""
    in_list = len(location) > 2 and isinstance(location[2], int)
    return tuple(location[:4] if in_list else location[:2])


def _sentence(item: Any) -> str:
    location = [str(part) for part in item["loc"] if not str(part).startswith("function-")]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {'.'.join([*location[:-1], close[0]])!r}?" if close else ""
        return f"Unknown key {key!r}: {hint or 'known are ' + ', '.join(known) + '.'}"
    if item["type"] in ("model_type", "dict_type"):
        first = next(iter(_known_keys(location)), "name")
        return f"{key} is a table: set {key}.{first}, or another key of it."
    if key == "evaluation.suite" and item["type"] == "tuple_type":
        return f"{key} is a list: write {key} = [{json.dumps(item['input'], default=str)}]."
    if item["type"] == "tuple_type" and _known_keys(location):
        return f"{key} is a list of tables: write [[{key}]], in two brackets, above each."
    if item["type"] == "missing":
        key = f"{key}.name" if key in ("model", "task") else key
        return f"{key} is missing: set it in the file or with --{key}=..."
    message = item["msg"].removeprefix("Value error, ").rstrip(".")
    if item["type"] == "value_error":
        return f"{message}." if "." in message.split(" ")[0] else f"{_prefix(key)}{message}."
    return f"{key} = {json.dumps(item['input'], default=str)}: {message[0].lower()}{message[1:]}."


def _prefix(key: str) -> str:
    return f"{key}: " if key else ""


def _known_keys(tables: Sequence[str]) -> list[str]:
    """Return the keys of a table, or of the tables in a list; none where it is a value."""
    model: Any = Config
    for table in tables:
        if not table.isdecimal():
            model = model.model_fields[table].annotation
            # a list of tables is annotated as tuple[Table, ...]
            model = next(iter(get_args(model)), model)
    return list(getattr(model, "model_fields", ()))


def _as_dict(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return dict(value) if isinstance(value, Mapping) else value
