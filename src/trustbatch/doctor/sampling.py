"""Which distributions do the tokens, their recorded log-probs and the anchor come from?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.doctor.distributions import Mismatch, SamplingDistribution, TokenStatistics
from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.doctor.recompute import Layout, in_precision, logit_rows, recompute
from trustbatch.doctor.search import search
from trustbatch.models.policy import Policy
from trustbatch.rollout.sampling import sampling_logprobs

MAX_Z = 5.0
"""a correct engine exceeds it once in two million examinations"""
MAX_OUTSIDE = 0.01
"""share of tokens that rounding may move out of the support"""
TIE_FACTOR = 1.5
"""the expected distribution is preferred if its residual is at most this much larger"""


@dataclass(frozen=True)
class SamplingResult:
    """The distributions of tokens and recorded log-probs, and the mismatch by its parts."""

    configured: SamplingDistribution
    sampled: SamplingDistribution
    """the distribution that the tokens were sampled from"""
    recorded: SamplingDistribution
    """the distribution whose log-probs were recorded"""
    z: dict[SamplingDistribution, float]
    """z-score of each distribution that was tested"""
    residuals: dict[SamplingDistribution, float]
    """mean |recorded - log-prob| for each distribution that was tested"""
    num_outside: int
    """tokens outside of the configured support"""
    is_tested: bool
    """False if the weights differ, which no distribution can explain"""
    total: Mismatch
    """as training sees it: policy against recorded log-probs"""
    true: Mismatch
    """policy against the distribution that the tokens were sampled from, if that is known"""
    parts: dict[str, Mismatch]
    """summands of the total: temperature, support, logprob_mode, arithmetic"""
    num_nonfinite: int
    """tokens without a finite ratio"""


def examine_sampling(
    policy: Policy,
    tokens: ExaminedTokens,
    layout: Layout,
    *,
    configured: SamplingDistribution,
    trained: SamplingDistribution,
    recorded_by_config: SamplingDistribution,
    engine_precision: str | None,
    weights_agree: bool,
    may_be_recorded: Sequence[SamplingDistribution] = (),
    say: Callable[[str], None],
) -> SamplingResult:
    """Find the distributions of tokens that were sampled as configured.

    Args:
        policy: the trainer's policy.
        tokens: tokens sampled as configured.
        layout: how the trainer packs its batches.
        configured: the configured sampling distribution.
        trained: the distribution of the policy that is trained.
        recorded_by_config: the distribution whose log-probs the configuration records.
        engine_precision: precision that the engine evidently computes in; None is the trainer's.
        weights_agree: False skips the search for other distributions.
        may_be_recorded: more distributions that the recorded log-probs may belong to.
        say: called with a line about each longer step.
    """
    say(f"testing {tokens.num_tokens} tokens against {configured}")
    sampled = configured
    candidates = {
        SamplingDistribution(),
        trained,
        configured,
        configured.untruncated,
        recorded_by_config,
        *may_be_recorded,
    }
    with in_precision(policy, engine_precision):
        statistics = recompute(policy, tokens, list(candidates), layout)
        if weights_agree:
            sampled = search(policy, tokens, configured, layout, temperatures=()).sampled
            if sampled != configured or not _fits(statistics[configured]):
                say("trying other temperatures, top-k and top-p")
                sampled = search(policy, tokens, configured, layout).sampled
            statistics |= recompute(policy, tokens, [sampled, sampled.untruncated], layout)
    residuals = {
        distribution: Mismatch.of(tokens.recorded - found.logp).mean_abs
        for distribution, found in statistics.items()
    }
    expected = recorded_by_config if recorded_by_config != configured else sampled
    recorded = best_fit(residuals, expected)
    with_trainer = (
        recompute(policy, tokens, list(statistics), layout) if engine_precision else statistics
    )
    logp = {distribution: found.logp for distribution, found in with_trainer.items()}
    total = logp[trained] - tokens.recorded
    return SamplingResult(
        configured=configured,
        sampled=sampled,
        recorded=recorded,
        z={distribution: found.z for distribution, found in statistics.items()},
        residuals=residuals,
        num_outside=statistics[configured].num_outside,
        is_tested=weights_agree,
        total=Mismatch.of(total),
        true=Mismatch.of(logp[trained] - statistics[sampled].logp if weights_agree else total),
        parts={
            "temperature": Mismatch.of(logp[trained] - logp[sampled.untruncated]),
            "support": Mismatch.of(logp[sampled.untruncated] - logp[sampled]),
            "logprob_mode": Mismatch.of(logp[sampled] - logp[recorded]),
            "arithmetic": Mismatch.of(logp[recorded] - tokens.recorded),
        },
        num_nonfinite=int((~torch.isfinite(total)).sum()),
    )


def best_fit(
    residuals: dict[SamplingDistribution, float], expected: SamplingDistribution
) -> SamplingDistribution:
    """Return the distribution with the smallest residual; the expected one wins ties."""
    best = min(residuals, key=lambda distribution: residuals[distribution])
    return expected if residuals[expected] <= TIE_FACTOR * residuals[best] else best


def _fits(statistics: TokenStatistics) -> bool:
    share_outside = statistics.num_outside / len(statistics.logp)
    return abs(statistics.z) <= MAX_Z and share_outside <= MAX_OUTSIDE


@dataclass(frozen=True)
class AnchorResult:
    """Which distribution the log-probs recorded for the anchor come from."""

    expected: SamplingDistribution
    """the distribution of the policy"""
    recorded: SamplingDistribution
    """the distribution whose log-probs were recorded"""
    residuals: dict[SamplingDistribution, float]
    """mean |recorded - log-prob| of the sampled tokens for each distribution that was tested"""
    top_residual: float
    """the same for the most likely tokens under `recorded`, weighted by probability"""
    mismatch: Mismatch
    """policy against recorded log-probs"""


def examine_anchor(
    policy: Policy,
    tokens: ExaminedTokens,
    layout: Layout,
    *,
    expected: SamplingDistribution,
    configured: SamplingDistribution,
    engine_precision: str | None,
    say: Callable[[str], None],
) -> AnchorResult:
    """Find the distribution of the anchor of tokens that were sampled as configured.

    Args:
        policy: the trainer's policy.
        tokens: tokens sampled as configured, with their anchor.
        layout: how the trainer packs its batches.
        expected: the distribution that the anchor should have.
        configured: the configured sampling distribution.
        engine_precision: precision that the engine evidently computes in; None is the trainer's.
        say: called with a line about each longer step.
    """
    say(f"comparing the anchor of {tokens.num_tokens} tokens with {expected}")
    anchors = tokens.with_anchor_logp()
    candidates = list(
        dict.fromkeys((expected, SamplingDistribution(), configured, configured.untruncated))
    )
    with in_precision(policy, engine_precision):
        statistics = recompute(policy, anchors, candidates, layout)
        residuals = {
            distribution: _anchor_residual(statistics[distribution].logp, anchors.recorded)
            for distribution in candidates
        }
        recorded = best_fit(residuals, expected)
        top_residual = _top_residual(policy, anchors, layout, recorded)
    ours = recompute(policy, anchors, [expected], layout)[expected]
    return AnchorResult(
        expected=expected,
        recorded=recorded,
        residuals=residuals,
        top_residual=top_residual,
        mismatch=Mismatch.of(ours.logp - anchors.recorded),
    )


def _anchor_residual(logp: Tensor, recorded: Tensor) -> float:
    """Return the mean of |l| over tokens in the distribution's support."""
    return float((logp - recorded)[torch.isfinite(logp)].abs().mean())


def _top_residual(
    policy: Policy, anchors: ExaminedTokens, layout: Layout, distribution: SamplingDistribution
) -> float:
    """Return the mean over positions of sum p |l| over the recorded tokens; 0 without any."""
    total = 0.0
    for rows in logit_rows(policy, anchors, layout):
        if rows.top_token_ids is None or rows.recorded_top is None:
            return 0.0
        logp = sampling_logprobs(rows.logits, distribution.sampling).gather(-1, rows.top_token_ids)
        weighted = logp.exp() * (logp - rows.recorded_top).abs()
        # 0 for tokens outside of the support
        total += float(weighted.masked_fill(logp.isneginf(), 0.0).double().sum())
    return total / anchors.num_tokens
