"""How much of a change of weights do an engine's log-probs show?

With d = the change of the trainer's log-probs of some tokens, and e = the engine's log-probs minus
the trainer's old ones, the share <e, d> / <d, d> is 1 for an engine that has the new weights and 0
for one that has the old ones. What is not correlated with d, such as rounding, does not bias it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_CLUSTERS = 6


@dataclass(frozen=True)
class UpdateShare:
    """The share of a change that an engine shows, from 0 to 1, and its standard error."""

    value: float
    error: float
    """infinite where too few tokens, or tokens of too few contexts, are known"""

    @classmethod
    def of(cls, shown: Tensor, effect: Tensor, cluster: Tensor) -> "UpdateShare":
        """Estimate it from T tokens [T], some of which belong to the same context or completion.

        The error is that of the jackknife over contexts: tokens of one context err together, and
        a single one with a large effect makes the estimate uncertain, not significant.
        """
        known = torch.isfinite(shown) & torch.isfinite(effect)
        shown, effect, cluster = shown[known].double(), effect[known].double(), cluster[known]
        groups, index = cluster.unique(return_inverse=True)
        product = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, index, shown * effect)
        square = torch.zeros_like(product).index_add_(0, index, effect.square())
        if len(groups) < MIN_CLUSTERS or float(square.sum()) <= 0.0:
            return cls(math.nan, math.inf)
        value = product.sum() / square.sum()
        without = (product.sum() - product) / (square.sum() - square)
        error = ((without - value).square().sum() * (len(groups) - 1) / len(groups)).sqrt()
        return cls(float(value), float(error.nan_to_num(nan=math.inf)))

    def is_below(self, bound: float, errors: float) -> bool:
        """Whether the share is below a bound by so many standard errors."""
        return self.value + errors * self.error < bound

    def is_above(self, bound: float, errors: float) -> bool:
        """Whether the share is above a bound by so many standard errors."""
        return self.value - errors * self.error > bound
