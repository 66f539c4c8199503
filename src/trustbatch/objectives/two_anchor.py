"""Two-anchor P3O: the KL is to a mixture of the behavior policy and a proximal snapshot."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.objectives.base import Totals, require
from trustbatch.objectives.estimators import RatioMoments, effective_sample_size
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.p3o import P3O, kl_to
from trustbatch.objectives.token_batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class TwoAnchor(P3O):
    """P3O with e = min(e_b, e_prox) and a KL toward an ESS-weighted mixture of both anchors.

    mix = ((1 - e_b) anchor + (1 - e_prox) pi_prox) / ((1 - e_b) + (1 - e_prox)), where `anchor` is
    the option of that name. The paper's appendix "Two-anchor extension of P3O". Where
    both weights vanish the KL term does too, since its factor 1 - e is then 0.
    """

    needs_proximal: ClassVar[bool] = True

    def moments(self, tokens: TokenBatch) -> dict[str, RatioMoments]:
        """Sums of the ratios to each anchor and of their squares."""
        proximal = require(tokens.proximal_logp, "proximal_logp", "two_anchor")
        return super().moments(tokens) | {"proximal": RatioMoments.of(tokens.logp - proximal)}

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the capped score-function loss and the KL toward the mixture."""
        moments = self.scoped_moments(tokens, totals)
        dtype = tokens.logp.dtype
        ess_behavior = effective_sample_size(moments["behavior"])
        ess_proximal = effective_sample_size(moments["proximal"])
        kl_weight = (1.0 - ess_behavior) + (1.0 - ess_proximal)
        # if both are 0 the share is arbitrary, since the KL is multiplied by 0
        share = torch.where(kl_weight > 0, (1.0 - ess_behavior) / kl_weight.clamp(min=1e-300), 1.0)
        proximal = require(tokens.proximal_logp, "proximal_logp", "two_anchor").detach()
        sampled_by, sampled_by_top = self.anchor_of(tokens)
        mixture = log_mixture(share.to(dtype), sampled_by, proximal)
        mixture_top = None
        if self.needs_top_logp:
            assert sampled_by_top is not None, "anchor_of has required it"
            proximal_top = require(tokens.proximal_top_logp, "proximal_top_logp", 'kl="top_k"')
            mixture_top = log_mixture(share.to(dtype), sampled_by_top, proximal_top.detach())
        ess = torch.minimum(ess_behavior, ess_proximal)
        kl = kl_to(self.kl, tokens, mixture, mixture_top)
        loss, metrics = self.capped_loss(tokens, totals, ess, kl)
        metrics["anchor/behavior_share"] = Mean.of(share.expand(tokens.logp.shape))
        metrics["anchor/ess_behavior"] = Mean.of(ess_behavior.expand(tokens.logp.shape))
        metrics["anchor/ess_proximal"] = Mean.of(ess_proximal.expand(tokens.logp.shape))
        return loss, metrics


def log_mixture(share: Tensor, first_logp: Tensor, second_logp: Tensor) -> Tensor:
    """Return log(share exp(first) + (1 - share) exp(second)); log 0 = -inf is a valid weight."""
    return torch.logaddexp(share.log() + first_logp, (1.0 - share).log() + second_logp)
