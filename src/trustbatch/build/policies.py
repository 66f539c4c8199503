"""The models of a run: the trained policy, its replica for sampling, and the frozen reference."""

from pathlib import Path

import torch

from trustbatch.checkpoints.load import unreadable
from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.models.loading import default_precision, resolve_device
from trustbatch.models.policy import Policy
from trustbatch.rollout.registry import engine_info
from trustbatch.training.sharding import shard
from trustbatch.utils.cuda_memory import limit_memory
from trustbatch.utils.distributed import num_ranks, rank_device


def load_checkpoint(config: Config, checkpoint: Path) -> Policy:
    """Load the policy of a checkpoint; with LoRA the base, whose adapters are restored later."""
    if config.model.lora is not None:
        return load_model(config)  # what was trained is the adapters beside it
    try:
        policy = load_model(config, str(checkpoint))
    except ConfigError as error:
        raise unreadable(checkpoint, error) from error
    policy.name = config.model.name
    return policy


def load_policy(config: Config) -> Policy:
    """Load the model of [model], with adapters where it has such a table."""
    policy = load_model(config)
    add_adapters(config, policy)
    return policy


def load_model(config: Config, name: str | None = None) -> Policy:
    """Load the model of [model], or another one in its place and precision."""
    device, precision = config.model.device, config.model.precision
    limit = config.model.gpu_memory_limit_gib
    if limit is not None:
        limit_memory(limit, torch.device(resolve_device(device)))
    if num_ranks() > 1:
        # they first divide it, and only then move their parts to where they compute
        if precision == "auto":
            precision = default_precision(rank_device(device).type)
        device = "cpu"
    is_own = name in (None, config.model.name)  # another one is a reference, and stays as it is
    policy = Policy.load(
        name or config.model.name,
        device=device,
        precision=precision,
        lora=config.model.lora if is_own else None,
        quantization=config.model.quantization if is_own else None,
        trust_remote_code=config.model.trust_remote_code,
    )
    if policy.quantization is not None and num_ranks() > 1:
        raise ConfigError(
            f"{policy.name} has quantized weights ({policy.quantization}), which can't be divided "
            "over processes: start the run without torchrun and with one trainer, or take the "
            "original model without model.quantization."
        )
    return policy


def add_adapters(config: Config, policy: Policy) -> None:
    """Add the adapters of [model.lora], where there is such a table."""
    if config.model.lora is not None:
        policy.add_adapters(config.model.lora, seed=config.seed)
        assert policy.adapters is not None
        policy.adapters.published_alone = _loads_adapters(config)
    elif policy.quantization is not None:
        raise ConfigError(
            f"{policy.name} was published with quantized weights ({policy.quantization}), which "
            "can't be trained: add the table [model.lora] for adapters beside them."
        )


def load_for_engine(config: Config) -> Policy:
    """Load a frozen model for an engine in another process, with what it gets weights for."""
    return (load_policy(config) if _loads_adapters(config) else load_model(config)).freeze()


def _loads_adapters(config: Config) -> bool:
    info = engine_info(config.rollout.engine)
    return info.loads_adapters(info.table(config.rollout))


def build_replica(config: Config, policy: Policy) -> Policy | None:
    """Copy the policy for a rank's own engine, before its parameters are sharded."""
    info = engine_info(config.rollout.engine)
    if num_ranks() == 1 or not info.one_per_rank or config.cluster is not None:
        return None
    replica = policy.replica(rank_device(config.model.device), precision=config.rollout.precision)
    if _loads_adapters(config):
        add_adapters(config, replica)
    return replica.freeze()


def shard_over_ranks(config: Config, policy: Policy, reference: Policy | None) -> None:
    """Divide the parameters of policy and reference over the ranks."""
    device, offload = rank_device(config.model.device), config.training.cpu_offload
    shard(policy, device=device, offload=offload)
    if reference is None:
        return
    if reference.model is policy.model:
        reference.device = policy.device  # the same without its adapters
    else:
        shard(reference, device=device, offload=offload)


def load_reference(config: Config, policy: Policy) -> Policy | None:
    """Load the frozen reference where the objective asks for one."""
    if not config.objective.build().reference_kl_coef:
        return None
    name = config.training.reference_model or config.model.name
    if policy.adapters is not None and name == config.model.name:
        return policy.without_adapters()
    return load_model(config, name).freeze()
