"""The anchor: are the log-probs that the objective pulls to those of the policy?"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.doctor.forwards import in_precision
from trustbatch.doctor.recompute import Layout, logit_rows, recompute
from trustbatch.doctor.sampling_distributions import Mismatch, SamplingDistribution
from trustbatch.models.policy import Policy
from trustbatch.rollout.sampling import sampling_logprobs


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
