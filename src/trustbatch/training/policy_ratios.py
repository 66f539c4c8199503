"""How far the trained policy is from each of several policies that sampled a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from trustbatch.objectives import TokenBatch
from trustbatch.objectives.estimators import RatioMoments, effective_sample_size
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.training.ratio_groups import moments_of, sampled_by


@dataclass(frozen=True)
class PolicyRatios:
    """Effective sample size and mean of the ratios of one policy's tokens."""

    moments: RatioMoments
    over_steps = staticmethod(Mean.over_steps)

    def merge(self, other: "PolicyRatios") -> "PolicyRatios":
        """Pool the ratios of two batches."""
        return PolicyRatios(self.moments + other.moments)

    def values(self, name: str) -> dict[str, float]:
        """Return NAME/one_minus_ess and NAME/ratio_mean, or nothing where there is no token."""
        if not float(self.moments.count):
            return {}
        return {
            f"{name}/one_minus_ess": 1.0 - float(effective_sample_size(self.moments)),
            f"{name}/ratio_mean": float(self.moments.ratio_sum / self.moments.count),
        }


def policy_ratios(tokens: TokenBatch, policies: Sequence[str]) -> Metrics:
    """Measure the tokens of each policy apart; `policies` [B] says who sampled which sequence."""
    return {
        f"policy/{policy}": PolicyRatios(moments_of(tokens, sampled_by(tokens, policies, policy)))
        for policy in dict.fromkeys(policies)
    }
