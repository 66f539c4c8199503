"""Weights and precision: does the engine compute what the trainer computes?

A stack is measured on tokens sampled at temperature 1 without truncation, where sampling settings
have no effect; rollouts of another engine under the distribution that their log-probs belong to.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trustbatch.doctor.distributions import Mismatch, SamplingDistribution
from trustbatch.doctor.examined_tokens import UNKNOWN, ExaminedTokens
from trustbatch.doctor.recompute import FP8_KV, PRECISIONS, Layout, in_precision, recompute
from trustbatch.doctor.search import search
from trustbatch.models.policy import Policy

PLAIN = SamplingDistribution()
FLOAT32_NOISE = 1e-4
"""mean |l| allowed between float32 engines: a hundred times the usual value"""
NOISE_FACTOR = 3.0
"""two low-precision computations may differ by this times the effect on the trainer"""
SAME_ROUNDING = 0.6
"""correlation of errors above which they count as the same rounding"""
RELATED_ROUNDING = 0.15
"""the same for an engine that declares no precision, if the size fits too: other kernels round in
other places, but an error of the weights is not correlated with rounding at all"""
CLEARLY_RELATED = 6.0
"""such a correlation must also be this many times what chance gives, 1 / sqrt(tokens)"""
RELATED_SIZE = (0.4, 2.0)
"""size of errors that are related, in those of the precision"""


@dataclass(frozen=True)
class ArithmeticResult:
    """How engine and trainer differ on the same tokens, and what explains it."""

    mismatch: Mismatch
    """engine against trainer"""
    allowed: float
    """mean |l| that rounding in the trainer's precision explains"""
    uncertainty: float
    """mean |l| up to which the trainer disagrees with itself"""
    effects: dict[str, Mismatch]
    """effect of other precisions on the trainer's own log-probs"""
    likeness: dict[str, float]
    """correlation of the engine's error with each effect"""
    explained_by: str | None
    """precision that the engine evidently computes in, if it is not the trainer's"""
    own_settings: SamplingDistribution | None
    """sampling settings that the engine evidently adds to the configured ones"""
    layouts: dict[str, Mismatch]
    """the trainer against itself with other packings"""

    @property
    def is_within_noise(self) -> bool:
        """Whether rounding explains the difference."""
        return self.mismatch.mean_abs <= self.uncertainty

    @property
    def is_explained(self) -> bool:
        """Whether rounding, a precision or sampling settings explain the difference."""
        return self.is_within_noise or bool(self.explained_by or self.own_settings)


def examine_arithmetic(
    policy: Policy, tokens: ExaminedTokens, layout: Layout, *, say: Callable[[str], None]
) -> ArithmeticResult:
    """Compare tokens sampled at T = 1 without truncation, and try settings where they differ."""
    result = compare_arithmetic(policy, tokens, layout, at=PLAIN, say=say)
    if result.is_explained:
        return result
    say("trying sampling settings")
    found = search(policy, tokens, PLAIN, layout)
    if found.recorded == PLAIN or found.recorded_residual > NOISE_FACTOR * result.uncertainty:
        return result
    return replace(result, own_settings=found.recorded)


def compare_arithmetic(
    policy: Policy,
    tokens: ExaminedTokens,
    layout: Layout,
    *,
    at: SamplingDistribution,
    say: Callable[[str], None],
) -> ArithmeticResult:
    """Recompute tokens in several precisions and layouts, under the distribution `at`."""

    def logp(precision: str | None = None, packed: Layout = layout) -> Tensor:
        with in_precision(policy, precision):
            return recompute(policy, tokens, [at], packed)[at].logp

    own = logp()
    error = tokens.recorded - own
    changes: dict[str, Tensor] = {}
    candidates = [each for each in PRECISIONS if each != policy.precision or each == "bfloat16"]
    if tokens.provenance.kv_precision == "fp8":
        candidates.append(FP8_KV)
    for precision in candidates:
        say(f"recomputing {tokens.num_tokens} tokens in {precision}")
        changes[precision] = logp(precision) - own
    mismatch = Mismatch.of(-error)
    effects = {name: Mismatch.of(-change) for name, change in changes.items()}
    likeness = {name: _cosine(error, change) for name, change in changes.items()}
    allowed = _allowed(policy.precision, effects)
    say("recomputing with other packings")
    layouts = {
        name: Mismatch.of(own - logp(packed=other))
        for name, other in _others(layout, tokens).items()
    }
    # the engine can't agree with the trainer better than the trainer with itself
    disagreement = max(found.mean_abs for found in layouts.values())
    uncertainty = max(allowed, NOISE_FACTOR * disagreement)
    explained_by = None
    if not mismatch.mean_abs <= uncertainty:
        explained_by = _matching_precision(policy.precision, tokens, mismatch, effects, likeness)
    return ArithmeticResult(
        mismatch=mismatch,
        allowed=allowed,
        uncertainty=uncertainty,
        effects=effects,
        likeness=likeness,
        explained_by=explained_by,
        own_settings=None,
        layouts=layouts,
    )


def _allowed(precision: str, effects: dict[str, Mismatch]) -> float:
    if precision == "float32":
        return FLOAT32_NOISE
    noise = max(effects["float32"].mean_abs, effects["bfloat16"].mean_abs)
    return max(NOISE_FACTOR * noise, FLOAT32_NOISE)


def _matching_precision(
    trainer: str,
    tokens: ExaminedTokens,
    mismatch: Mismatch,
    effects: dict[str, Mismatch],
    likeness: dict[str, float],
) -> str | None:
    """Return the precision whose rounding correlates with the errors, or the declared one."""
    engine = tokens.provenance.precision
    others = [name for name in effects if name != trainer]
    best = max(others, key=lambda name: likeness[name])
    if likeness[best] > SAME_ROUNDING:
        return best
    declared = [name for name in (engine, FP8_KV) if name in others]
    if not declared and engine == UNKNOWN:
        related = max(RELATED_ROUNDING, CLEARLY_RELATED / math.sqrt(tokens.num_tokens))
        smallest, largest = (bound * effects[best].mean_abs for bound in RELATED_SIZE)
        is_related = likeness[best] > related and smallest <= mismatch.mean_abs <= largest
        return best if is_related else None
    # kernels scale differently, so errors need not correlate: their size must match
    coarsest = max(declared, key=lambda name: effects[name].mean_abs, default=None)
    if coarsest and mismatch.mean_abs <= NOISE_FACTOR * effects[coarsest].mean_abs:
        return coarsest
    return None


def _others(layout: Layout, tokens: ExaminedTokens) -> dict[str, Layout]:
    """Return layouts that should give the same numbers."""
    lengths = [sequence.num_tokens for sequence in tokens.sequences]
    # small enough for several batches
    smaller = max(min(layout.max_tokens, sum(lengths)) // 4, *lengths)
    return {
        f"micro_batch_tokens = {smaller}": Layout(smaller, layout.share_prompts),
        f"share_prompts = {str(not layout.share_prompts).lower()}": Layout(
            layout.max_tokens, not layout.share_prompts
        ),
    }


def _cosine(a: Tensor, b: Tensor) -> float:
    finite = torch.isfinite(a) & torch.isfinite(b)
    return float(torch.nn.functional.cosine_similarity(a[finite], b[finite], dim=0))
