"""Metrics of a batch of rollouts."""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from trustbatch.rewards import rewards_of
from trustbatch.training.lag_metrics import COMPLETIONS_BY_LAG
from trustbatch.types import Completion, FinishReason, Grade, GradeStatus, Role, RolloutGroup


def rollout_metrics(
    groups: Sequence[RolloutGroup], *, policy: str, version: int
) -> dict[str, float]:
    """Return rewards, lengths and lags of a graded batch that is about to be trained on.

    The trained `policy` is at `version`; the lag of a token that it sampled itself is the number of
    versions since then, and the lag of a completion is that of its first token. Where second
    policies sampled some completions, there are metrics per policy.
    """
    rewards = rewards_of(groups)
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([c.num_sampled for c in completions], dtype=torch.float64)
    truncated = [c.finish_reason is FinishReason.LENGTH for c in completions]
    own = [c for c in completions if c.provenance.policy == policy]
    lags = Counter(version - c.provenance.version for c in own)
    given = rewards[~rewards.isnan()]
    metrics = {
        "reward/equal_groups_fraction": sum(map(_all_equal, rewards.tolist())) / len(groups),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated_fraction": sum(truncated) / len(truncated),
    }
    if lags:
        metrics["rollout/lag_mean"] = sum(version - _mean_version(c) for c in own) / len(own)
        metrics["rollout/lag_max"] = float(max(lags))
        if spanning := sum(c.versions is not None for c in own):
            metrics["rollout/spanning_fraction"] = spanning / len(own)
        metrics |= {f"{COMPLETIONS_BY_LAG}{lag}": float(count) for lag, count in lags.items()}
    if len(given):
        metrics["reward/mean"] = float(given.mean())
        metrics["reward/std"] = float(given.std(correction=0))
    metrics |= _by_task([group.prompt.task for group in groups], rewards.nanmean(dim=1).tolist())
    metrics |= _episodes(completions)
    metrics |= _grade_metrics([grade for group in groups for grade in group.grades])
    return metrics | _by_policy(completions, rewards.flatten().tolist())


def _mean_version(completion: Completion) -> float:
    """Return the mean over a completion's tokens of the versions that sampled them."""
    if completion.versions is None:
        return completion.provenance.version
    return float(completion.version_of_token.double().mean())


def _all_equal(rewards: Sequence[float]) -> bool:
    """Whether no two rewards of a group differ, so that it has no signal."""
    return len({reward for reward in rewards if not math.isnan(reward)}) <= 1


def _grade_metrics(grades: Sequence[Grade]) -> dict[str, float]:
    """Count completions without a grade by status, and average the terms of rewards."""
    metrics = {
        f"reward/{status}": float(sum(grade.status is status for grade in grades))
        for status in GradeStatus
        if status is not GradeStatus.GRADED
    }
    parts: dict[str, list[float]] = {}
    for grade in grades:
        for name, value in grade.parts.items():
            parts.setdefault(name, []).append(value)
    return metrics | {
        f"reward/{name}/mean": sum(values) / len(values) for name, values in parts.items()
    }


def _by_task(tasks: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
    """Return the share of groups and the mean reward per task, if there are several."""
    names = dict.fromkeys(tasks)
    if len(names) == 1:
        return {}
    metrics: dict[str, float] = {}
    for name in names:
        own = [r for task, r in zip(tasks, rewards, strict=True) if task == name]
        graded = [reward for reward in own if math.isfinite(reward)]
        metrics[f"task/{name}/share"] = len(own) / len(tasks)
        if graded:
            metrics[f"task/{name}/reward"] = sum(graded) / len(graded)
    return metrics


def _episodes(completions: Sequence[Completion]) -> dict[str, float]:
    """Return turns, endings and tokens of episodes, where there is an environment."""
    episodes = [completion for completion in completions if completion.turns]
    if not episodes:
        return {}
    turns = [sum(turn.role is Role.POLICY for turn in each.turns) for each in episodes]
    ended = [each.finish_reason is FinishReason.STOP for each in episodes]
    sampled = sum(each.num_sampled for each in episodes)
    return {
        "episode/turns_mean": sum(turns) / len(turns),
        "episode/turns_max": float(max(turns)),
        "episode/ended_fraction": sum(ended) / len(ended),
        "episode/sampled_tokens": float(sampled),
        "episode/environment_tokens": float(sum(len(e.token_ids) for e in episodes) - sampled),
    }


def _by_policy(completions: Sequence[Completion], rewards: Sequence[float]) -> dict[str, float]:
    """Return share of completions, tokens and mean reward per policy, if there are several."""
    rows: dict[str, list[tuple[int, float]]] = {}
    for completion, reward in zip(completions, rewards, strict=True):
        row = (completion.num_sampled, reward)
        rows.setdefault(completion.provenance.policy, []).append(row)
    if len(rows) == 1:
        return {}
    metrics: dict[str, float] = {}
    for policy, own in rows.items():
        metrics[f"policy/{policy}/share"] = len(own) / len(completions)
        metrics[f"policy/{policy}/tokens"] = float(sum(tokens for tokens, _ in own))
        given = [reward for _, reward in own if not math.isnan(reward)]
        if given:
            metrics[f"policy/{policy}/reward"] = sum(given) / len(given)
    return metrics
