"""The models of a run: the trained policy, its replica for sampling, and the frozen reference."""

from pathlib import Path

from trustbatch.checkpoints.load import unreadable
from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.models.loading import default_precision
from trustbatch.models.policy import Policy
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
    limit_memory(config.model.gpu_memory_limit_gib, rank_device(device))
    if num_ranks() > 1:
        # they first divide it, and only then move their parts to where they compute
        if precision == "auto":
            precision = default_precision(rank_device(device).type)
        device = "cpu"
    return Policy.load(
        name or config.model.name,
        device=device,
        precision=precision,
        lora=config.model.lora,
        trust_remote_code=config.model.trust_remote_code,
    )


def add_adapters(config: Config, policy: Policy) -> None:
    """Add the adapters of [model.lora], where there is such a table."""
    if config.model.lora is not None:
        policy.add_adapters(config.model.lora, seed=config.seed)


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
