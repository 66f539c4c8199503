"""From another trainer's tensors to an objective: its tokens, the totals of a step, its name.

    objective = as_objective("p3o")
    tokens = [padded_tokens(logp=..., behavior_logp=..., advantage=..., mask=...) for ... in step]
    totals = step_totals(objective, tokens)          # over all micro-batches and ranks
    loss = objective(tokens[0], totals).loss         # this micro-batch's share of the step's loss

The shares of all micro-batches and ranks add up to the loss of the step. So where a trainer divides
by the number of micro-batches, or averages gradients over ranks, multiply by these numbers.
"""

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trustbatch.errors import ConfigError
from trustbatch.objectives import OBJECTIVES, Objective, TokenBatch, Totals
from trustbatch.utils.distributed import all_gather
from trustbatch.utils.options import check_options, find_entry

ObjectiveChoice = str | Mapping[str, Any] | Objective
"""a name, a table such as {"name": "grpo", "clip_high": 0.28}, or an instance"""


def as_objective(choice: ObjectiveChoice) -> Objective:
    """Return the objective that a name, a table or an instance stands for."""
    if isinstance(choice, Objective):
        return choice
    options: dict[str, Any] = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = options.pop("name", None)
    try:
        if not isinstance(name, str):
            raise ValueError('An objective\'s table needs its name: {"name": "p3o"}.')
        make = find_entry(OBJECTIVES, name, kind="objective")
        check_options(make, options, what=f"objective {name}", table="objective")
        return make(**options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def padded_tokens(
    *,
    logp: Tensor,
    behavior_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    **others: Tensor | None,
) -> TokenBatch:
    """Return the tokens of padded tensors [B, T] where the mask [B, T] is not 0.

    Args:
        logp: [B, T] log-probs of the policy being optimized, with gradient.
        behavior_logp: [B, T] log-probs of the distribution that the tokens were sampled from.
        advantage: [B], of sequences, or [B, T].
        mask: [B, T] which tokens were sampled: not prompts, padding or an environment's replies.
        others: [B, T] other fields of TokenBatch, such as `entropy` or `reference_logp`.
    """
    kept = mask.bool()
    rows = torch.arange(logp.shape[0], device=logp.device)[:, None]
    if advantage.dim() == 1:
        advantage = advantage[:, None]
    given = {name: value[kept] for name, value in others.items() if value is not None}
    return TokenBatch(
        logp=logp[kept],
        behavior_logp=behavior_logp[kept],
        advantage=advantage.expand(logp.shape)[kept],
        sequence=rows.expand(logp.shape)[kept],
        **given,
    )


def step_totals(objective: Objective, batches: Iterable[TokenBatch]) -> Totals:
    """Return the totals of an optimizer step from this rank's micro-batches. Collective.

    Where `objective.totals_need_policy`, they must have the log-probs of the policy as it is before
    the step. Otherwise any finite log-probs do, such as those of the behavior policy.
    """
    own = [(objective.totals(tokens), tokens.logp.device) for tokens in batches]
    if not own:
        raise ConfigError("An optimizer step needs at least one micro-batch on every rank.")
    of_rank = functools.reduce(operator.add, (totals for totals, _ in own))
    return functools.reduce(operator.add, all_gather(of_rank)).to(own[0][1])
