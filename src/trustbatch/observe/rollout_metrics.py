"""Numbers about a batch of rollouts."""

from collections.abc import Sequence

import torch

from trustbatch.rewards import rewards_of
from trustbatch.types import Completion, FinishReason, Role, RolloutGroup


def rollout_metrics(
    groups: Sequence[RolloutGroup], *, policy: str, version: int
) -> dict[str, float]:
    """Describe rewards, lengths and age of a graded batch about to be trained on.

    `policy` at `version` trains on it; the lag of a completion that it drew itself is how much
    older that version was. Where second policies drew some, each policy has numbers of its own.
    """
    rewards = rewards_of(groups)
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([c.num_drawn for c in completions], dtype=torch.float64)
    truncated = [c.finish_reason is FinishReason.LENGTH for c in completions]
    lags = [version - c.provenance.version for c in completions if c.provenance.policy == policy]
    equal = (rewards == rewards[:, :1]).all(dim=1)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/equal_groups_fraction": float(equal.double().mean()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": sum(truncated) / len(truncated),
    }
    if lags:
        metrics["rollout/lag_mean"] = sum(lags) / len(lags)
        metrics["rollout/lag_max"] = float(max(lags))
    metrics |= _episodes(completions)
    return metrics | _by_policy(completions, rewards.flatten().tolist())


def _episodes(completions: Sequence[Completion]) -> dict[str, float]:
    """Return turns, endings and tokens of episodes, where an environment answers."""
    episodes = [completion for completion in completions if completion.turns]
    if not episodes:
        return {}
    turns = [sum(turn.role is Role.POLICY for turn in each.turns) for each in episodes]
    ended = [each.finish_reason is FinishReason.STOP for each in episodes]
    drawn = sum(each.num_drawn for each in episodes)
    return {
        "episode/turns_mean": sum(turns) / len(turns),
        "episode/turns_max": float(max(turns)),
        "episode/ended_fraction": sum(ended) / len(ended),
        "episode/drawn_tokens": float(drawn),
        "episode/environment_tokens": float(sum(len(e.token_ids) for e in episodes) - drawn),
    }


def _by_policy(completions: Sequence[Completion], rewards: Sequence[float]) -> dict[str, float]:
    """Return share of completions, tokens and mean reward of each policy, if there are several."""
    rows: dict[str, list[tuple[int, float]]] = {}
    for completion, reward in zip(completions, rewards, strict=True):
        row = (completion.num_drawn, reward)
        rows.setdefault(completion.provenance.policy, []).append(row)
    if len(rows) == 1:
        return {}
    metrics: dict[str, float] = {}
    for policy, drawn in rows.items():
        metrics[f"policy/{policy}/share"] = len(drawn) / len(completions)
        metrics[f"policy/{policy}/tokens"] = float(sum(tokens for tokens, _ in drawn))
        metrics[f"policy/{policy}/reward"] = sum(reward for _, reward in drawn) / len(drawn)
    return metrics
