"""P3O: the effective sample size caps the score-function weight and sets the weight of the KL."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trustbatch.objectives.base import Objective, Totals, require, require_choice
from trustbatch.objectives.estimators import (
    RatioMoments,
    bounded,
    effective_sample_size,
    kl_importance,
    kl_k3,
    kl_top_k,
)
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.token_batch import TokenBatch

KL_CHOICES = ("auto", "importance", "k3", "top_k", "none")
ESS_SCOPES = ("step", "micro_batch")
ANCHORS = ("model", "sampler")


@dataclass(frozen=True, kw_only=True)
class P3O(Objective):
    """loss = (1/N) sum [ -sg(min(r, e)) A logp + (1 - e) KL(pi || anchor) ].

    e = sg((sum r)^2 / (N sum r^2)) is the normalized effective sample size of the ratios to what
    was actually sampled from. Fakoor et al., the paper's equation for L_P3O and its Algorithm 2.
    Differences from the paper: the anchor is the *model* that sampled the token, before temperature
    and truncation (`anchor="sampler"` takes the tempered, truncated one, as the text says); e is
    taken over the whole optimizer step (`ess_scope="micro_batch"` takes it per micro-batch, as
    Algorithm 2 does), and `kl` chooses how the KL is measured (see `estimators`).
    """

    kl: str = "auto"
    """"auto": "top_k" where the engine recorded the top log-probs, otherwise "importance\""""
    anchor: str = "model"
    ess_scope: str = "step"

    # False in a subclass whose weights depend on more totals than e
    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("kl", self.kl, KL_CHOICES)
        require_choice("anchor", self.anchor, ANCHORS)
        require_choice("ess_scope", self.ess_scope, ESS_SCOPES)

    @property
    def totals_need_policy(self) -> bool:
        """An ESS over the whole step must be known before the first backward pass."""
        return self.ess_scope == "step"

    @property
    def estimates_totals(self) -> bool:
        """Only where the weights depend on this one effective sample size, not in a subclass."""
        return type(self).moments is P3O.moments

    def totals_distance(self, one: Totals, other: Totals) -> float:
        """Cap and KL weight change by as much as e does."""
        first, second = (effective_sample_size(each.moments["behavior"]) for each in (one, other))
        return abs(float(first) - float(second))

    @property
    def needs_top_logp(self) -> bool:
        """The bucketed KL compares whole distributions, not sampled tokens."""
        return self.kl == "top_k"

    @property
    def needs_anchor(self) -> bool:
        """Only the KL to the model needs more than the sampling distribution."""
        return self.anchor == "model" and self.kl != "none"

    def resolved(self, *, has_top_logp: bool) -> "P3O":
        """Choose the best estimate of the KL that the data allows."""
        return replace(self, kl=resolved_kl(self.kl, has_top_logp=has_top_logp))

    def moments(self, tokens: TokenBatch) -> dict[str, RatioMoments]:
        """Sums of the behavior ratios and of their squares."""
        return {"behavior": RatioMoments.of(tokens.logp - tokens.behavior_logp)}

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the capped score-function loss and the ESS-weighted KL to the anchor."""
        moments = self.scoped_moments(tokens, totals)
        ess = effective_sample_size(moments["behavior"])
        kl = kl_to(self.kl, tokens, *self.anchor_of(tokens))
        return self.capped_loss(tokens, totals, ess, kl)

    def anchor_of(self, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs [T] and [T, K] of the anchor that the option `anchor` names."""
        anchor = model_anchor if self.anchor == "model" else sampler_anchor
        return anchor(self.kl, tokens)

    def scoped_moments(self, tokens: TokenBatch, totals: Totals) -> dict[str, RatioMoments]:
        """Moments over the set of tokens that `ess_scope` names."""
        return totals.moments if self.ess_scope == "step" else self.moments(tokens)

    def capped_loss(
        self, tokens: TokenBatch, totals: Totals, ess: Tensor, kl: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return (1/N) sum [ -sg(min(r, e)) A logp + (1 - e) KL ]."""
        ratio = bounded(tokens.logp.detach() - tokens.behavior_logp).exp()
        # 1 - e is taken in float64: near the on-policy limit it is far below float32's resolution
        cap, kl_weight = ess.to(ratio.dtype), (1.0 - ess).to(ratio.dtype)
        score = -ratio.clamp(max=cap) * tokens.advantage * tokens.logp
        loss = totals.per_token(score + kl_weight * kl)
        return loss, {
            "kl/penalty": Mean.of(kl),
            # on-policy, cap and ratios are 1 up to rounding, which does not count as capped
            "ratio/capped_fraction": Mean.of((ratio > cap * (1.0 + 1e-5)).float()),
            "weight/cap": Mean.of(ess.expand(ratio.shape)),
        }


def resolved_kl(kl: str, *, has_top_logp: bool) -> str:
    """Return which estimate "auto" stands for; the others stand for themselves."""
    if kl != "auto":
        return kl
    return "top_k" if has_top_logp else "importance"


def sampler_anchor(kl: str, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs [T] and [T, K] of the distribution sampled from."""
    return tokens.behavior_logp, _top(kl, tokens.behavior_top_logp, "behavior_top_logp")


def model_anchor(kl: str, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
    """Return those of the model before temperature and truncation; recorded where they differ."""
    if tokens.anchor_logp is None:
        return sampler_anchor(kl, tokens)
    return tokens.anchor_logp, _top(kl, tokens.anchor_top_logp, "anchor_top_logp")


def _top(kl: str, top_logp: Tensor | None, name: str) -> Tensor | None:
    return require(top_logp, name, 'kl="top_k"') if kl == "top_k" else None


def kl_to(
    kl: str, tokens: TokenBatch, anchor_logp: Tensor, anchor_top_logp: Tensor | None
) -> Tensor:
    """Return KL(pi || anchor) at each token [T], by the estimator that `kl` names."""
    if kl == "none":
        return torch.zeros_like(tokens.logp)
    if kl == "top_k":
        assert anchor_top_logp is not None, "every anchor requires it"
        return kl_top_k(require(tokens.top_logp, "top_logp", 'kl="top_k"'), anchor_top_logp)
    x = tokens.logp - anchor_logp
    if kl == "k3":
        return kl_k3(x)
    return kl_importance(tokens.logp - tokens.behavior_logp, x, anchor_logp - tokens.behavior_logp)
