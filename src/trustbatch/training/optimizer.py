"""AdamW, with moments in 32 or 8 bits, and its learning-rate schedule."""

import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from trustbatch.errors import ConfigError
from trustbatch.training.host_memory import HostAdamW
from trustbatch.training.layers import refuse_missing_compiler


def build_optimizer(
    name: str,
    parameters: Iterable[Parameter],
    *,
    betas: tuple[float, float],
    weight_decay: float,
    offload: bool = False,
) -> Optimizer:
    """Build AdamW; the learning rate is set before each step by the schedule.

    With `offload` its moments are in host memory.
    """
    settings: dict[str, Any] = {"lr": 0.0, "betas": betas, "weight_decay": weight_decay}
    parameters = list(parameters)
    if name == "adamw_8bit":
        library = _import_torchao()
        refuse_missing_compiler('training.optimizer = "adamw_8bit"', "adamw", parameters[0].device)
        return library.AdamW8bit(parameters, **settings)
    if offload:
        return HostAdamW(parameters, fused=True, **settings)
    return torch.optim.AdamW(parameters, fused=True, **settings)


def create_moments(optimizer: Optimizer) -> None:
    """Create what the first step of a run would create, while nothing else is in memory.

    In the middle of a GPU's memory the moments would split what is free, and the keys and values of
    a rollout would not fit where activations were. Those in 8 bits are a quarter as large, and
    those in host memory split nothing: the first step creates them.
    """
    if type(optimizer) is not torch.optim.AdamW:
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def _import_torchao() -> Any:
    try:
        return import_module("torchao.optim")
    except ImportError as error:
        raise ConfigError(
            f'training.optimizer = "adamw_8bit" needs the package torchao ({error}): '
            "pip install 'trustbatch[torchao]', or set it to adamw."
        ) from error


def learning_rate_factor(
    step: int, total_steps: int, *, warmup_fraction: float, schedule: str
) -> float:
    """Return the factor of the peak learning rate at the step-th optimizer step, from 0.

    Linear warm-up, then a cosine to zero or a constant. It depends on the step alone, so a resumed
    run needs no state for it.
    """
    num_warmup = math.ceil(warmup_fraction * total_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    if schedule == "constant":
        return 1.0
    progress = (step - num_warmup) / max(total_steps - num_warmup, 1)
    return 0.5 * (1.0 + math.cos(math.pi * progress))
