"""Weights and precision: does the engine compute what the trainer computes?

Measured on tokens sampled at temperature 1 without truncation: sampling settings have no effect.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.doctor.distributions import Mismatch, SamplingDistribution
from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.doctor.recompute import PRECISIONS, Layout, in_precision, recompute
from trustbatch.doctor.search import search
from trustbatch.models.policy import Policy

PLAIN = SamplingDistribution()
FLOAT32_NOISE = 1e-4
"""mean |l| allowed between float32 engines: a hundred times the usual value"""
NOISE_FACTOR = 3.0
"""two low-precision computations may differ by this times the effect on the trainer"""
SAME_ROUNDING = 0.6
"""correlation of errors above which they count as the same rounding"""


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
    """Recompute tokens sampled at T = 1 without truncation in several precisions and layouts."""

    def logp(precision: str | None = None, packed: Layout = layout) -> Tensor:
        with in_precision(policy, precision):
            return recompute(policy, tokens, [PLAIN], packed)[PLAIN].logp

    own = logp()
    error = tokens.recorded - own
    changes: dict[str, Tensor] = {}
    for precision in PRECISIONS:
        if precision != policy.precision or precision == "bfloat16":
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
    explained_by, own_settings = None, None
    if not mismatch.mean_abs <= uncertainty:
        explained_by = _matching_precision(
            policy.precision, tokens.provenance.precision, mismatch, effects, likeness
        )
        if explained_by is None:
            say("trying sampling settings")
            found = search(policy, tokens, PLAIN, layout)
            if found.recorded != PLAIN and found.recorded_residual <= NOISE_FACTOR * uncertainty:
                own_settings = found.recorded
    return ArithmeticResult(
        mismatch=mismatch,
        allowed=allowed,
        uncertainty=uncertainty,
        effects=effects,
        likeness=likeness,
        explained_by=explained_by,
        own_settings=own_settings,
        layouts=layouts,
    )


def _allowed(precision: str, effects: dict[str, Mismatch]) -> float:
    if precision == "float32":
        return FLOAT32_NOISE
    noise = max(effects["float32"].mean_abs, effects["bfloat16"].mean_abs)
    return max(NOISE_FACTOR * noise, FLOAT32_NOISE)


def _matching_precision(
    trainer: str,
    engine: str,
    mismatch: Mismatch,
    effects: dict[str, Mismatch],
    likeness: dict[str, float],
) -> str | None:
    """Return the precision whose rounding correlates with the errors, or the declared one."""
    others = [name for name in effects if name != trainer]
    best = max(others, key=lambda name: likeness[name])
    if likeness[best] > SAME_ROUNDING:
        return best
    declared = engine in others
    # kernels scale differently, so errors need not correlate: their size must match
    if declared and mismatch.mean_abs <= NOISE_FACTOR * effects[engine].mean_abs:
        return engine
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
