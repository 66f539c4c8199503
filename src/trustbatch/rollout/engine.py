"""Rollout engines: the interface that samples completions, and what each engine declares."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from trustbatch.types import Completion, GenerationRequest

if TYPE_CHECKING:  # a configuration reads what engines declare, without loading their modules
    from trustbatch.models.policy import Policy


class RolloutEngine(Protocol):
    """Samples completions from one version of the policy at a time."""

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all completions, in the order of the requests, then of their samples."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the policy's parameters as the given version."""
        ...

    def sleep(self) -> None:
        """Free the memory that only generation needs, until `wake`."""
        ...

    def wake(self) -> None:
        """Get ready to generate after `sleep`; the weights are those of `version`."""
        ...

    def close(self) -> None:
        """End the engine, with all its processes and files."""
        ...


@dataclass(frozen=True)
class Engines:
    """What samples the completions of a run."""

    trained: RolloutEngine
    """the trained policy alone"""
    all: RolloutEngine
    """with second policies; closing it closes everything"""


class NewerWeights(Protocol):
    """Weights that are published while an engine generates (in-flight updates)."""

    def has_newer(self, version: int) -> bool:
        """Whether there is a newer version; called between tokens, so it must be cheap."""
        ...

    def apply(self) -> None:
        """Load the newest version into the engine and check it; no sequence is running."""
        ...


class InFlightEngine(RolloutEngine, Protocol):
    """An engine that applies newer weights in the middle of `generate`."""

    newer_weights: NewerWeights | None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The values of a configuration that an engine is built with."""

    seed: int
    version: int
    """of the policy's weights"""
    precision: str
    kv_precision: str
    max_sequences: int
    prompts_per_call: int | None
    top_logprobs: int
    logprob_mode: str
    anchor_temperature: float | None
    """temperature of the anchor's log-probs, where they are recorded"""
    trust_remote_code: bool
    device: torch.device
    """where the engine computes"""
    table: Any
    """the engine's own table of [rollout]; None if it has none"""
    log_folder: Path | None
    """where the log of a process of the engine goes; None: it is kept after an error only"""


class EngineInfo:
    """What an engine declares about itself; the rest of the package never tests its name.

    `table` is always the engine's own table of [rollout], or None if it has none.
    """

    name: ClassVar[str]
    """value of rollout.engine"""
    label: ClassVar[str]
    """name in memory plans"""
    config_table: ClassVar[str | None] = None
    """name of its table in [rollout]"""
    shares_parameters: ClassVar[bool] = False
    """samples from the parameters of the policy it is given; else it has a copy of its own"""
    supports_in_flight: ClassVar[bool] = False
    """implements `InFlightEngine`"""
    one_per_rank: ClassVar[bool] = False
    """every trainer rank has an engine, on a replica of the policy; else only rank 0 has one"""
    expandable_segments: ClassVar[bool] = False
    """generation and training need torch's expandable segments on a GPU"""
    sleep_key: ClassVar[str | None] = None
    """key that lets it free its GPU memory during training"""
    records_anchor_freely: ClassVar[bool] = False
    """can always record the anchor's log-probs, at little cost, whatever the objective needs"""
    gpus_key: ClassVar[str | None] = None
    """key that sets how many GPUs one engine uses"""

    def build(self, policy: "Policy", settings: EngineSettings) -> RolloutEngine:
        """Start the engine with the weights of a policy."""
        raise NotImplementedError

    def table(self, rollout: Any) -> Any:
        """Return the engine's own table of a [rollout] table."""
        return None if self.config_table is None else getattr(rollout, self.config_table)

    def require(self) -> None:
        """Raise ConfigError if a package that the engine needs is not installed."""

    def check_ranks(self, table: Any, num_ranks: int) -> None:
        """Raise ConfigError if the engine can't serve `num_ranks` trainer ranks."""

    def loads_adapters(self, table: Any) -> bool:
        """Whether it loads LoRA adapters beside frozen weights; else it gets merged weights."""
        return False

    def weight_dtype(self, precision: str) -> torch.dtype | None:
        """Return the dtype to which all weights are rounded when loaded; None: they are not."""
        return None

    def num_gpus(self, table: Any) -> int:
        """Return how many GPUs one engine uses."""
        return 1

    def reserved_bytes(self, table: Any, gpu_memory: float) -> float | None:
        """Return the GPU memory that one engine reserves beside the trainer.

        None: it allocates as needed, for keys, values and logits.
        """
        return None

    def sleeps(self, table: Any) -> bool:
        """Whether it frees its reserved memory during training."""
        return False
