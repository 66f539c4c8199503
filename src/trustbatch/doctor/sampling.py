"""Sampling"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.doctor.distributions import LawStatistics, Mismatch, SamplingDistribution
from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.doctor.recompute import Layout, in_precision, logit_rows, recompute
from trustbatch.doctor.search import search
from trustbatch.models.policy import Policy
from trustbatch.rollout.sampling import sampling_logprobs

MAX_Z = 5.0
"""a healthy engine exceeds it once in two million examinations"""
MAX_OUTSIDE = 0.01
"""share of tokens that rounding may push over the edge of the support"""


@dataclass(frozen=True)
class SamplingResult:
    """The laws of tokens and numbers, and the mismatch split into its parts."""

    configured: SamplingDistribution
    sampled: SamplingDistribution
    """law that the tokens were sampled from"""
    recorded: SamplingDistribution
    """law whose log-probs were recorded"""
    z: dict[SamplingDistribution, float]
    """of each law that was tested"""
    residuals: dict[SamplingDistribution, float]
    """mean |recorded - log-prob| for each law that the numbers may stand for"""
    num_outside: int
    """tokens that the configured law could not have sampled"""
    is_tested: bool
    """False where the weights differ, which no law can explain"""
    total: Mismatch
    """as training sees it: policy against recorded numbers"""
    true: Mismatch
    """policy against the law that the tokens were sampled from, where that is known"""
    parts: dict[str, Mismatch]
    """summands of the total: temperature, support, logprob_mode, arithmetic"""
    num_nonfinite: int
    """tokens without a finite ratio"""


def examine_sampling(
    policy: Policy,
    samples: ExaminedTokens,
    layout: Layout,
    *,
    configured: SamplingDistribution,
    policy_law: SamplingDistribution,
    recorded_by_config: SamplingDistribution,
    engine_precision: str | None,
    weights_agree: bool,
    say: Callable[[str], None],
) -> SamplingResult:
    """Find the laws behind tokens sampled as configured.

    Args:
        policy: the trainer's.
        samples: tokens sampled as the configuration says.
        layout: how the trainer packs its batches.
        configured: law that the configuration asks the engine for.
        policy_law: law of the policy that is trained.
        recorded_by_config: law whose log-probs the configuration asks for.
        engine_precision: precision that the engine evidently computes in; None is the trainer's.
        weights_agree: False skips the search for other laws.
        say: gets a line about each longer step.
    """
    say(f"testing {samples.num_tokens} tokens against {configured}")
    sampled, recorded = configured, recorded_by_config
    laws = {SamplingDistribution(), policy_law, configured, configured.uncut, recorded_by_config}
    with in_precision(policy, engine_precision):
        statistics = recompute(policy, samples, list(laws), layout)
        if weights_agree:
            sampled = search(policy, samples, configured, layout, temperatures=()).sampled
            if sampled != configured or not _fits(statistics[configured]):
                say("trying other temperatures and cuts")
                sampled = search(policy, samples, configured, layout).sampled
            statistics |= recompute(policy, samples, [sampled, sampled.uncut], layout)
    residuals = {law: _residual(samples, found) for law, found in statistics.items()}
    expected = recorded_by_config if recorded_by_config != configured else sampled
    best = min(residuals, key=lambda law: residuals[law])
    # two laws may fit alike: then the expected one does
    recorded = expected if residuals[expected] <= 1.5 * residuals[best] else best
    with_trainer = (
        recompute(policy, samples, list(statistics), layout) if engine_precision else statistics
    )
    logp = {law: found.logp for law, found in with_trainer.items()}
    total = logp[policy_law] - samples.recorded
    return SamplingResult(
        configured=configured,
        sampled=sampled,
        recorded=recorded,
        z={law: found.z for law, found in statistics.items()},
        residuals=residuals,
        num_outside=statistics[configured].num_outside,
        is_tested=weights_agree,
        total=Mismatch.of(total),
        true=Mismatch.of(logp[policy_law] - statistics[sampled].logp if weights_agree else total),
        parts={
            "temperature": Mismatch.of(logp[policy_law] - logp[sampled.uncut]),
            "support": Mismatch.of(logp[sampled.uncut] - logp[sampled]),
            "logprob_mode": Mismatch.of(logp[sampled] - logp[recorded]),
            "arithmetic": Mismatch.of(logp[recorded] - samples.recorded),
        },
        num_nonfinite=int((~torch.isfinite(total)).sum()),
    )


def _fits(statistics: LawStatistics) -> bool:
    share_outside = statistics.num_outside / len(statistics.logp)
    return abs(statistics.z) <= MAX_Z and share_outside <= MAX_OUTSIDE


def _residual(samples: ExaminedTokens, statistics: LawStatistics) -> float:
    return Mismatch.of(samples.recorded - statistics.logp).mean_abs


@dataclass(frozen=True)
class AnchorResult:
    """What the numbers recorded for the anchor stand for."""

    expected: SamplingDistribution
    """that of the policy"""
    recorded: SamplingDistribution
    """law whose log-probs were recorded"""
    residuals: dict[SamplingDistribution, float]
    """mean |recorded - log-prob| of the sampled tokens for each law that was tried"""
    top_residual: float
    """likewise of the most likely tokens and `recorded`, each by its probability"""
    mismatch: Mismatch
    """policy against recorded numbers"""


def examine_anchor(
    policy: Policy,
    samples: ExaminedTokens,
    layout: Layout,
    *,
    expected: SamplingDistribution,
    configured: SamplingDistribution,
    engine_precision: str | None,
    say: Callable[[str], None],
) -> AnchorResult:
    """Find the law behind the anchor of tokens sampled as configured.

    Args:
        policy: the trainer's.
        samples: tokens sampled as the configuration says, with their anchor.
        layout: how the trainer packs its batches.
        expected: law that the anchor ought to have.
        configured: law that the tokens ought to be sampled from.
        engine_precision: precision that the engine evidently computes in; None is the trainer's.
        say: gets a line about each longer step.
    """
    say(f"comparing the anchor of {samples.num_tokens} tokens with {expected}")
    anchors = samples.of_anchor()
    laws = list(dict.fromkeys((expected, SamplingDistribution(), configured, configured.uncut)))
    with in_precision(policy, engine_precision):
        found = recompute(policy, anchors, laws, layout)
        residuals = {law: _residual(found[law].logp, anchors.recorded) for law in laws}
        best = min(laws, key=lambda law: residuals[law])
        # two laws may fit alike: then the expected one does
        recorded = expected if residuals[expected] <= 1.5 * residuals[best] else best
        top_residual = _top_residual(policy, anchors, layout, recorded)
    ours = recompute(policy, anchors, [expected], layout)[expected]
    return AnchorResult(
        expected=expected,
        recorded=recorded,
        residuals=residuals,
        top_residual=top_residual,
        mismatch=Mismatch.of(ours.logp - anchors.recorded),
    )


def _residual(logp: Tensor, recorded: Tensor) -> float:
    """Return the mean of |l| over tokens that the law could have sampled."""
    return float((logp - recorded)[torch.isfinite(logp)].abs().mean())


def _top_residual(
    policy: Policy, anchors: ExaminedTokens, layout: Layout, law: SamplingDistribution
) -> float:
    """Return the mean over positions of sum p |l| over the recorded tokens; 0 without any."""
    total = 0.0
    for rows in logit_rows(policy, anchors, layout):
        if rows.top_token_ids is None or rows.recorded_top is None:
            return 0.0
        logp = sampling_logprobs(rows.logits, law.sampling).gather(-1, rows.top_token_ids)
        weighted = logp.exp() * (logp - rows.recorded_top).abs()
        # 0 of what the law excludes
        total += float(weighted.masked_fill(logp.isneginf(), 0.0).double().sum())
    return total / anchors.num_tokens
