"""Distributions that tokens may have been sampled from, and how far log-probs differ."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.objectives.estimators import RatioMoments, effective_sample_size
from trustbatch.types import SamplingParams


@dataclass(frozen=True)
class SamplingDistribution:
    """softmax(logits / temperature), truncated to top-k, then to top-p, and renormalized."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, sampling: SamplingParams) -> "SamplingDistribution":
        """Return the distribution that sampling parameters describe."""
        return cls(sampling.temperature, sampling.top_k, sampling.top_p)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters that describe this distribution."""
        return SamplingParams(
            max_tokens=1,
            stop_token_ids=(),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )

    @property
    def is_full(self) -> bool:
        """Whether every token can be sampled."""
        return self.top_k == 0 and self.top_p == 1.0

    @property
    def untruncated(self) -> "SamplingDistribution":
        """The same temperature with every token."""
        return SamplingDistribution(self.temperature)

    @property
    def support(self) -> str:
        """The truncation in words."""
        parts = [f"top_k = {self.top_k}"] if self.top_k else []
        parts += [f"top_p = {self.top_p:g}"] if self.top_p < 1.0 else []
        return " and ".join(parts) or "all tokens"

    def __str__(self) -> str:
        truncation = "" if self.is_full else f", {self.support}"
        return f"T = {self.temperature:g}{truncation}"


@dataclass(frozen=True)
class TokenStatistics:
    """T sampled tokens under one distribution, [T] float64 each."""

    logp: Tensor
    """-inf for a token that the distribution excludes"""
    expected: Tensor
    """expected log-prob at that position: minus the entropy"""
    variance: Tensor
    """variance of the log-prob at that position"""

    @property
    def num_outside(self) -> int:
        """Number of tokens that the distribution excludes."""
        return int((~torch.isfinite(self.logp)).sum())

    @property
    def z(self) -> float:
        """Standardized sum of log p + entropy: mean 0 and variance 1 for the true distribution.

        It does not depend on recorded log-probs. The terms are martingale differences, so their
        variances add although each token depends on those before it.
        """
        inside = torch.isfinite(self.logp)
        surplus = float((self.logp - self.expected)[inside].sum())
        return surplus / math.sqrt(max(float(self.variance[inside].sum()), 1e-12))


@dataclass(frozen=True)
class Mismatch:
    """Size of log-ratios l [T], as training would see them."""

    mean_ratio: float
    mean_ratio_error: float
    """standard error of the mean ratio"""
    one_minus_ess: float
    mean_abs: float
    max_abs: float

    @classmethod
    def of(cls, log_ratio: Tensor) -> "Mismatch":
        """Measure the finite log-ratios."""
        log_ratio = log_ratio[torch.isfinite(log_ratio)].double()
        if log_ratio.numel() == 0:
            return cls(math.nan, math.nan, math.nan, math.nan, math.nan)
        ratio = log_ratio.exp()
        error = float(ratio.std(correction=0)) / math.sqrt(ratio.numel())
        return cls(
            mean_ratio=float(ratio.mean()),
            mean_ratio_error=error,
            one_minus_ess=1.0 - float(effective_sample_size(RatioMoments.of(log_ratio))),
            mean_abs=float(log_ratio.abs().mean()),
            max_abs=float(log_ratio.abs().max()),
        )
