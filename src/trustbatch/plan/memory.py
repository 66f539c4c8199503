"""Memory"""

from dataclasses import dataclass

from trustbatch.config import ALL_LINEAR, Config, LoraConfig


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters instead of all parameters."""

    rank: int
    targets: tuple[str, ...] | None = None
    """names of the layers that have one; None is every product of the decoder layers"""
    base_bytes: int = 4
    """of a frozen weight beside an adapter"""

    @classmethod
    def of(cls, config: LoraConfig) -> "Lora":
        """Read them off [model.lora]."""
        return cls(
            rank=config.rank,
            targets=None if ALL_LINEAR in config.targets else config.targets,
            base_bytes=2 if config.base_precision == "bfloat16" else 4,
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The values of the configuration that memory depends on, and the number of GPUs."""

    num_gpus: int = 1
    micro_batch_tokens: int
    max_sequences: int
    gradient_checkpointing: bool = False
    compiled: bool = False
    eight_bit_optimizer: bool = False
    cpu_offload: bool = False
    lora: Lora | None = None
    vllm_sleeps: bool = False
    """whether vLLM gives its memory back while the policy is trained"""
    direct_transfer: bool = False
    """whether the weights for a cluster's engines wait for them on the first trainer's GPU"""

    @classmethod
    def of(cls, config: Config, *, num_gpus: int = 1) -> "Setting":
        """Read them off a configuration."""
        training, lora, cluster = config.training, config.model.lora, config.cluster
        return cls(
            num_gpus=num_gpus,
            micro_batch_tokens=training.micro_batch_tokens,
            max_sequences=config.rollout.max_sequences,
            gradient_checkpointing=training.gradient_checkpointing,
            compiled=training.compile,
            eight_bit_optimizer=training.optimizer == "adamw_8bit",
            cpu_offload=training.cpu_offload,
            lora=None if lora is None else Lora.of(lora),
            vllm_sleeps=config.rollout.vllm.sleep,
            direct_transfer=cluster is not None and cluster.weight_transfer in ("auto", "direct"),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered layer by layer when they are needed."""
        return self.num_gpus > 1


GIB = 2**30


@dataclass(frozen=True)
class Part:
    """Something that takes memory."""

    name: str
    num_bytes: float
    is_elastic: bool = False
    """whether the run goes on, more slowly, where there is less"""


@dataclass(frozen=True)
class Phase:
    """The moment of a phase at which it takes most memory."""

    name: str
    """generate or train"""
    parts: tuple[Part, ...]

    @property
    def total(self) -> float:
        """Bytes of all parts, as torch counts what is allocated."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def needed(self) -> float:
        """Bytes without which the phase can't run."""
        return sum(part.num_bytes for part in self.parts if not part.is_elastic)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes, and what there is."""

    phases: tuple[Phase, ...]
    capacity: float
    """bytes that torch can have"""
    is_gpu: bool
    num_gpus: int
    prompt_tokens: int
    is_prompt_assumed: bool
    """whether the tokenizer could not be asked"""

    def phase(self, name: str) -> Phase:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def needed(self) -> float:
        """Bytes without which the run fails."""
        return max(phase.needed for phase in self.phases)

    @property
    def fits(self) -> bool:
        """Whether the run has what it needs."""
        return self.needed <= self.capacity


def size(num_bytes: float) -> str:
    """Return a number of bytes as people read it."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
