"""What an objective does to each token: its weight beside the advantage, whatever the formula."""

from dataclasses import replace

import torch
from torch import Tensor

from trustbatch.objectives.base import Objective, Totals
from trustbatch.objectives.token_batch import TokenBatch


def token_weights(objective: Objective, batch: TokenBatch, totals: Totals) -> Tensor:
    """Return the weight w [T] with which each token's advantage enters the gradient.

    The loss pushes a token's log-prob by w A / N, besides its other terms, such as a KL: w is 1 for
    REINFORCE, min(r, e) for P3O, and r or, where the clip silences the token, 0 for GRPO. It is the
    difference of two gradients, with the advantage and without, so it needs no formula of its own.
    NaN where the advantage is 0 or a log-prob can't be measured.
    """
    moved = token_pushes(objective, batch, totals)
    unmoved = token_pushes(
        objective, replace(batch, advantage=torch.zeros_like(batch.advantage)), totals
    )
    has_weight = (batch.advantage != 0) & batch.measurable()
    weight = (moved - unmoved) / torch.where(has_weight, batch.advantage, 1.0)
    return torch.where(has_weight, weight, torch.nan)


@torch.enable_grad()
def token_pushes(objective: Objective, batch: TokenBatch, totals: Totals) -> Tensor:
    """Return -N dL/dlogp [T]: how strongly the loss raises the log-prob of each sampled token.

    What a loss does through the log-probs of other tokens (`top_logp`) or the entropy is not in it.
    """
    logp = batch.logp.detach().requires_grad_()
    fixed = {
        name: value.detach()
        for name in ("entropy", "top_logp")
        if (value := getattr(batch, name)) is not None
    }
    loss = objective(replace(batch, logp=logp, **fixed), totals).loss
    (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True, materialize_grads=True)
    return -gradient * totals.num_tokens.to(gradient.dtype)
