"""AdamW and its learning-rate schedule."""

import math
from collections.abc import Iterable

import torch
from torch.nn import Parameter


def build_adamw(
    parameters: Iterable[Parameter], *, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Build AdamW; the learning rate is set before each step by the schedule."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)


def learning_rate_factor(
    step: int, total_steps: int, *, warmup_fraction: float, schedule: str
) -> float:
    """Return the factor of the peak learning rate at the step-th optimiser step, from 0.

    Linear warm-up, then a cosine to zero or a constant. A pure function of the step: a resumed run
    needs no state for it.
    """
    num_warmup = math.ceil(warmup_fraction * total_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    if schedule == "constant":
        return 1.0
    progress = (step - num_warmup) / max(total_steps - num_warmup, 1)
    return 0.5 * (1.0 + math.cos(math.pi * progress))
