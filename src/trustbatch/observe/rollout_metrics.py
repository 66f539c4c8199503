"""Numbers about a batch of rollouts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trustbatch.types import FinishReason, RolloutGroup


def rollout_metrics(
    groups: Sequence[RolloutGroup], rewards: Tensor, *, version: int
) -> dict[str, float]:
    """Describe rewards [groups, samples], lengths and age of a batch about to be trained on.

    `version` is the policy version that trains on it; a completion's lag is how much older it is.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.float64)
    truncated = [c.finish_reason is FinishReason.LENGTH for c in completions]
    lags = [version - c.provenance.version for c in completions]
    equal = (rewards == rewards[:, :1]).all(dim=1)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/equal_groups_fraction": float(equal.double().mean()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": sum(truncated) / len(truncated),
        "rollout/lag_mean": sum(lags) / len(lags),
        "rollout/lag_max": float(max(lags)),
    }
