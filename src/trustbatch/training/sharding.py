"""Parameters sharded over the ranks by FSDP2, one decoder layer at a time."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy, decoder_layers
from trustbatch.training.config import TrainingConfig
from trustbatch.utils.distributed import num_ranks


def shard(policy: Policy, *, device: torch.device, offload: bool = False) -> None:
    """Shard every parameter over the ranks; layers are gathered one by one when they are computed.

    Gradients are summed over ranks, not averaged: objectives divide by the totals of the whole
    step. Embedding, last norm and head are gathered in float32, so that the residual stream stays
    float32 as in a single process; the layers in the precision of their products.
    """
    mesh = init_device_mesh(device.type, (num_ranks(),))
    placement = CPUOffloadPolicy() if offload else OffloadPolicy()
    in_layers = MixedPrecisionPolicy(
        param_dtype=policy.product_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if policy.product_dtype is None:
        in_layers = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=in_layers, offload_policy=placement)
    around = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(policy.root, mesh=mesh, mp_policy=around, offload_policy=placement)
    for module in policy.root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # a plain sum: only NCCL supports one with a factor, even if the factor is 1
            module.set_force_sum_reduction_for_comms(True)
    policy.device = device


def refuse_useless_offload(config: TrainingConfig, device: torch.device) -> None:
    """Refuse a kind of offload without a GPU, or for another number of ranks than it is for."""
    for key in ("cpu_offload", "optimizer_offload", "activation_offload"):
        if getattr(config, key) and device.type == "cpu":
            raise ConfigError(
                f"training.{key} keeps in host memory what is there already with "
                "model.device = cpu: set it to false."
            )
    if config.cpu_offload and num_ranks() == 1:
        raise ConfigError(
            "training.cpu_offload only applies to parameters sharded over several processes: "
            "start the run with torchrun, or set training.optimizer_offload = true in its place."
        )
    if config.optimizer_offload and num_ranks() > 1:
        raise ConfigError(
            "training.optimizer_offload is for one process: set training.cpu_offload = true in its "
            "place."
        )
