"""REINFORCE: the score-function gradient, which treats every token as on-policy."""

from dataclasses import dataclass

from torch import Tensor

from trustbatch.objectives.base import Objective, Totals
from trustbatch.objectives.metrics import Metrics
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class Reinforce(Objective):
    """loss = -(1/N) sum A logp.

    Williams 1992; the paper's equation for the policy gradient. It ignores the behavior policy, so
    it is correct on-policy only.
    """

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return -(1/N) sum A logp."""
        return -totals.per_token(tokens.advantage * tokens.logp), {}
