"""How far the trained policy is from its own earlier versions that drew a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.lag_metrics import ONE_MINUS_ESS_BY_LAG
from trustbatch.objectives import TokenBatch
from trustbatch.objectives.estimators import RatioMoments, effective_sample_size
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.training.ratio_groups import moments_by_label
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
    """Return the lags of the completions that `policy` drew itself, at `version` now."""
    drawn_by = (sequence.completion.provenance for sequence in sequences)
    return {version - drawn.version for drawn in drawn_by if drawn.policy == policy}


def lag_ratios(tokens: TokenBatch, batch: MicroBatch, *, policy: str, version: int) -> Metrics:
    """Measure the tokens of each lag apart; what second policies drew has none."""
    lags = [
        version - drawn_at if drawn_by == policy else None
        for drawn_by, drawn_at in zip(batch.policies, batch.versions, strict=True)
    ]
    return {
        f"{ONE_MINUS_ESS_BY_LAG}{lag}": LagRatios(moments)
        for lag, moments in moments_by_label(tokens, lags).items()
    }
