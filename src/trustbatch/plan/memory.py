"""The terms of a memory plan: settings that memory depends on, and bytes by phase and part."""

from dataclasses import dataclass

from trustbatch.config import Config
from trustbatch.models.config import ALL_LINEAR, LoraConfig
from trustbatch.rollout.registry import engine_info
from trustbatch.utils.cuda_memory import GIB


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA adapters instead of training all parameters."""

    rank: int
    targets: tuple[str, ...] | None = None
    """names of the adapted layers; None is every linear layer of the decoder"""
    base_precision: str = "auto"
    """of the frozen weights; "auto" is that of matrix products"""

    @classmethod
    def of(cls, config: LoraConfig) -> "Lora":
        """Read [model.lora]."""
        return cls(
            rank=config.rank,
            targets=None if ALL_LINEAR in config.targets else config.targets,
            base_precision=config.base_precision,
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that memory depends on, beside the model: all that advice can change."""

    num_gpus: int = 1
    micro_batch_tokens: int
    max_sequences: int
    gradient_checkpointing: bool = False
    compiled: bool = False
    eight_bit_optimizer: bool = False
    cpu_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
    lora: Lora | None = None
    quantization: str | None = None
    """format of the frozen linear layers"""
    fp8_cache: bool = False
    """whether keys and values are kept in 8 bits"""
    engine_sleeps: bool = False
    """whether the engine frees its reserved memory while the policy is trained"""
    direct_transfer: bool = False
    """whether weights for a cluster's engines are kept on the first trainer's GPU"""

    @classmethod
    def of(cls, config: Config, *, num_gpus: int = 1) -> "Setting":
        """Read a configuration."""
        training, lora, cluster = config.training, config.model.lora, config.cluster
        info = engine_info(config.rollout.engine)
        return cls(
            num_gpus=num_gpus,
            micro_batch_tokens=training.micro_batch_tokens,
            max_sequences=config.rollout.max_sequences,
            gradient_checkpointing=training.gradient_checkpointing,
            compiled=training.compile,
            eight_bit_optimizer=training.optimizer == "adamw_8bit",
            cpu_offload=training.cpu_offload,
            optimizer_offload=training.optimizer_offload,
            activation_offload=training.activation_offload,
            quantization=config.model.quantization,
            fp8_cache=config.rollout.kv_precision == "fp8",
            lora=None if lora is None else Lora.of(lora),
            engine_sleeps=info.sleeps(info.table(config.rollout)),
            direct_transfer=cluster is not None
            and cluster.weight_transfer in ("auto", "process_group"),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded, and gathered layer by layer."""
        return self.num_gpus > 1


FLOAT32, BFLOAT16 = 4, 2
"""bytes per number"""


CACHE = "keys and values"
"""the part of which sequences wait for one another"""


@dataclass(frozen=True)
class Part:
    """One use of memory."""

    name: str
    num_bytes: float
    least: float | None = None
    """bytes with which the run can go on, more slowly; None: it needs all"""

    def times(self, number: int) -> "Part":
        """Return the memory of as many equal ones."""
        least = None if self.least is None else number * self.least
        return Part(self.name, number * self.num_bytes, least)


@dataclass(frozen=True)
class Phase:
    """A phase of a step at its peak."""

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
        return self.needed_beside("")

    def needed_beside(self, name: str) -> float:
        """Bytes without which the phase can't run, those of one part left aside."""
        return sum(
            part.num_bytes if part.least is None else part.least
            for part in self.parts
            if part.name != name
        )


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a run needs per GPU (or per process on a CPU), and the capacity."""

    phases: tuple[Phase, ...]
    capacity: float
    """bytes available to torch"""
    is_gpu: bool
    num_gpus: int
    prompt_tokens: int
    is_prompt_assumed: bool
    """whether the prompt length is a guess, without a tokenizer"""

    def phase(self, name: str) -> Phase:
        """Return a phase by name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def needed(self) -> float:
        """Bytes without which the run fails."""
        return max(phase.needed for phase in self.phases)

    @property
    def fits(self) -> bool:
        """Whether the needed memory is available."""
        return self.needed <= self.capacity


def size(num_bytes: float) -> str:
    """Format a number of bytes."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
