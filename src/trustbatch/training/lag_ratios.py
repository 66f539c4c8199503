"""How far the trained policy is from its own earlier versions that sampled a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.objectives import TokenBatch
from trustbatch.objectives.estimators import RatioMoments, effective_sample_size
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.training.lag_metrics import ONE_MINUS_ESS_BY_LAG
from trustbatch.training.ratio_groups import moments_of, sampled_by
from trustbatch.types import TrainSequence


@dataclass(frozen=True)
class LagRatios:
    """One minus the effective sample size of the ratios of one lag's tokens."""

    moments: RatioMoments
    over_steps = staticmethod(Mean.over_steps)

    def merge(self, other: "LagRatios") -> "LagRatios":
        """Pool the ratios of two batches."""
        return LagRatios(self.moments + other.moments)

    def values(self, name: str) -> dict[str, float]:
        """Return the number, or nothing where there is no token."""
        if not float(self.moments.count):
            return {}
        return {name: 1.0 - float(effective_sample_size(self.moments))}


def lags_of(sequences: Sequence[TrainSequence], *, policy: str, version: int) -> set[int]:
    """Return the lags of the tokens that `policy` sampled itself, at `version` now."""
    completions = (sequence.completion for sequence in sequences)
    own = (completion for completion in completions if completion.provenance.policy == policy)
    return {version - sampled_at for completion in own for sampled_at in completion.all_versions}


def lag_ratios(tokens: TokenBatch, batch: MicroBatch, *, policy: str, version: int) -> Metrics:
    """Measure the tokens of each lag apart; what second policies sampled has none."""
    is_own = sampled_by(tokens, batch.policies, policy)
    lag = version - batch.version
    return {
        f"{ONE_MINUS_ESS_BY_LAG}{each}": LagRatios(moments_of(tokens, is_own & (lag == each)))
        for each in lag[is_own].unique().tolist()
    }
