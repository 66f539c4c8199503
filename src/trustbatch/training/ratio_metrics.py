"""Policy ratios of parts of a batch: the tokens of each sampling policy, and of each lag.

The lag of a token is the number of versions between the policy that is trained and the policy that
sampled the token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.objectives import TokenBatch
from trustbatch.objectives.estimators import RatioMoments
from trustbatch.objectives.metrics import Mean, Metrics, OneMinusEss
from trustbatch.training.lag_metrics import ONE_MINUS_ESS_BY_LAG, RATIO_MEAN_BY_LAG
from trustbatch.types import TrainSequence


def policy_ratios(tokens: TokenBatch, policies: Sequence[str]) -> Metrics:
    """Return 1-ESS and mean ratio per policy; `policies` [B] is the sampler of each sequence."""
    metrics: Metrics = {}
    for policy in dict.fromkeys(policies):
        moments = _moments(tokens, _is_sampled_by(tokens, policies, policy))
        metrics[f"policy/{policy}/one_minus_ess"] = OneMinusEss(moments)
        metrics[f"policy/{policy}/ratio_mean"] = Mean(moments.ratio_sum, moments.count)
    return metrics


def lags_of(sequences: Sequence[TrainSequence], *, policy: str, version: int) -> set[int]:
    """Return the lags of the tokens that `policy` sampled itself, where it is at `version` now."""
    completions = (sequence.completion for sequence in sequences)
    own = (completion for completion in completions if completion.provenance.policy == policy)
    return {version - sampled_at for completion in own for sampled_at in completion.all_versions}


def lag_ratios(tokens: TokenBatch, batch: MicroBatch, *, policy: str, version: int) -> Metrics:
    """Return 1-ESS and mean ratio per lag of the tokens that `policy` sampled.

    Tokens of other policies have no lag.
    """
    is_own = _is_sampled_by(tokens, batch.policies, policy)
    lag = version - batch.version
    metrics: Metrics = {}
    for each in lag[is_own].unique().tolist():
        moments = _moments(tokens, is_own & (lag == each))
        metrics[f"{ONE_MINUS_ESS_BY_LAG}{each}"] = OneMinusEss(moments)
        metrics[f"{RATIO_MEAN_BY_LAG}{each}"] = Mean(moments.ratio_sum, moments.count)
    return metrics


@torch.no_grad()
def _moments(tokens: TokenBatch, chosen: Tensor) -> RatioMoments:
    """Return the ratio moments of the chosen tokens, [T] bool."""
    log_ratio = tokens.logp - tokens.behavior_logp
    return RatioMoments.of(log_ratio[chosen & tokens.measurable()])


def _is_sampled_by(tokens: TokenBatch, policies: Sequence[str], policy: str) -> Tensor:
    """Return which tokens [T] a policy sampled; `policies` [B] is the sampler of each sequence."""
    is_own = [each == policy for each in policies]
    return torch.tensor(is_own, dtype=torch.bool, device=tokens.logp.device)[tokens.sequence]
