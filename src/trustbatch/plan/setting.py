"""What decides how much memory a step takes, beside the model: all that advice can change."""

from dataclasses import dataclass

from trustbatch.config import Config
from trustbatch.models.config import ALL_LINEAR, LoraConfig
from trustbatch.rollout.registry import engine_info


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
    engine_sleeps: bool = False
    """whether the engine frees its reserved memory while the policy is trained"""
    direct_transfer: bool = False
    """whether the weights for a cluster's engines wait for them on the first trainer's GPU"""

    @classmethod
    def of(cls, config: Config, *, num_gpus: int = 1) -> "Setting":
        """Read them off a configuration."""
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
            lora=None if lora is None else Lora.of(lora),
            engine_sleeps=info.sleeps(info.table(config.rollout)),
            direct_transfer=cluster is not None
            and cluster.weight_transfer in ("auto", "process_group"),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered layer by layer when they are needed."""
        return self.num_gpus > 1
