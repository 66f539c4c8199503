"""REINFORCE: the score-function gradient, which takes every token as sampled by the policy itself."""

from dataclasses import dataclass

from torch import Tensor

from trustbatch.objectives.base import Objective, Totals
from trustbatch.objectives.metrics import Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class Reinforce(Objective):
    """loss = -(1/N) sum A logp.

    Williams 1992; the paper's equation for the policy gradient. It does not look at the behavior
    policy at all, so it is right on-policy only.
    """

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return -(1/N) sum A logp."""
        return -totals.per_token(tokens.advantage * tokens.logp), {}
