"""Parameters divided over the ranks: FSDP2, one decoder layer at a time."""

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
    """Leave each rank its part of every parameter, gathered layer by layer when it is computed.

    The gradient becomes the sum over ranks, not their mean: objectives divide by the totals of the
    whole step. Embedding, last norm and head are gathered in float32, so that the residual stream
    stays float32 as in a single process; the layers in the precision of their products.
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
            # a plain sum: only NCCL knows one with a factor, also if that is 1
            module.set_force_sum_reduction_for_comms(True)
    policy.device = device


def refuse_useless_offload(config: TrainingConfig, device: torch.device) -> None:
    """Refuse `training.cpu_offload` where nothing is divided, or host memory is all there is."""
    if not config.cpu_offload:
        return
    if device.type == "cpu":
        raise ConfigError(
            "training.cpu_offload keeps parameters in host memory, where they are already with "
            "model.device = cpu: set it to false."
        )
    if num_ranks() == 1:
        raise ConfigError(
            "training.cpu_offload belongs to parameters that are divided over several processes: "
            "start the run with torchrun, or set it to false."
        )
