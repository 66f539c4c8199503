"""PACT: proximal anchor, capped trust. P3O with a KL weight from the batch's uncertainty."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.objectives.base import Objective, Totals, require, require_choice, require_number
from trustbatch.objectives.estimators import RatioMoments, bounded, effective_sample_size
from trustbatch.objectives.metrics import Mean, Metrics
from trustbatch.objectives.p3o import KL_CHOICES, kl_to, model_anchor, resolved_kl
from trustbatch.objectives.token_batch import TokenBatch

ANCHORS = ("proximal", "model", "both")
PULLS = ("standard_error", "deviation")
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, kw_only=True)
class PACT(Objective):
    """loss = (1/N) sum [ -sg(min(r, e_s)) A logp + (1 - e_s) KL(pi || model) + c KL(pi || prox) ].

    e_s is the effective sample size of the ratios of the tokens that the same source (policy and
    version) sampled, `model` the model that sampled the token, before temperature and truncation,
    and c the standard error of the advantage over the effective number of sequences:

        c = rms(A) min(1, n_eff^(-1/2)),   n_eff = n (s e_prox)^(tokens per sequence)

    with n sequences in the step, e_prox the effective sample size of pi under prox and s = m / m_0
    the fraction of prox's mass on the data's support that pi has kept, m = E[pi / pi_b] and
    m_0 = E[prox / pi_b]. For ablations, `anchor="proximal"` omits the KL to the model, and
    `anchor="model"` replaces prox by the model.
    """

    kl: str = "auto"
    anchor: str = "both"
    pull: str | float = "standard_error"
    """how c is computed, or a constant for ablations"""

    needs_proximal: ClassVar[bool] = True
    sees_support: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("kl", self.kl, KL_CHOICES)
        require_choice("anchor", self.anchor, ANCHORS)
        if isinstance(self.pull, str):
            require_choice("pull", self.pull, PULLS)
        else:
            require_number("pull", self.pull)

    @property
    def totals_need_policy(self) -> bool:
        """The ESS must be known before the first backward pass of a step."""
        return True

    @property
    def needs_top_logp(self) -> bool:
        """The bucketed KL compares whole distributions, not sampled tokens."""
        return self.kl == "top_k"

    @property
    def needs_anchor(self) -> bool:
        """Only the KL to the model needs the model's log-probs from the engine."""
        return self.anchor != "proximal" and self.kl != "none"

    def resolved(self, *, has_top_logp: bool) -> "PACT":
        """Choose the best estimate of the KL that the data allows."""
        return replace(self, kl=resolved_kl(self.kl, has_top_logp=has_top_logp))

    def moments(self, tokens: TokenBatch) -> dict[str, RatioMoments]:
        """Sums of the behavior ratios and of their squares, for each source."""
        log_ratio = tokens.logp - tokens.behavior_logp
        source = _sources(tokens)
        return {
            f"behavior/{each}": RatioMoments.of(log_ratio[source == each])
            for each in {0, *source.unique().tolist()}
        }

    def sums(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """Squared advantages of sequences, and the sums that measure the drift from the anchor."""
        anchor = self._anchor(tokens)
        policy = bounded((tokens.logp.detach() - tokens.behavior_logp).double())
        anchored = bounded((anchor - tokens.behavior_logp).double())
        ids, index = torch.unique(tokens.sequence, return_inverse=True)
        zeros = torch.zeros(len(ids), dtype=torch.float64, device=policy.device)
        length = zeros.index_add(0, index, torch.ones_like(policy))
        squares = zeros.index_add(0, index, tokens.advantage.double().square()) / length
        return {
            "advantage_squares": squares.sum(),
            "policy_mass": policy.exp().sum(),
            "anchor_mass": anchored.exp().sum(),
            "second_moment": (2 * policy - anchored).exp().sum(),
        }

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the capped score-function loss and the KL to the anchor."""
        ratio = bounded(tokens.logp.detach() - tokens.behavior_logp).exp()
        ess = _ess_of_source(tokens, totals)
        # 1 - e is taken in float64, as in P3O
        cap, kl_weight = ess.to(ratio.dtype), (1.0 - ess).to(ratio.dtype)
        pull = self._pull(totals).to(ratio.dtype)
        kl = kl_to(self.kl, tokens, *self._anchor_logps(tokens))
        score = -torch.minimum(ratio, cap) * tokens.advantage * tokens.logp
        loss = score + pull * kl
        if self.anchor == "both":
            loss = loss + kl_weight * kl_to(self.kl, tokens, *model_anchor(self.kl, tokens))
        return totals.per_token(loss), {
            "kl/penalty": Mean.of(kl),
            "ratio/capped_fraction": Mean.of((ratio > cap * (1.0 + 1e-5)).float()),
            "weight/cap": Mean.of(ess),
            "pull/strength": Mean.of(pull.expand(ratio.shape)),
            "pull/sequences": Mean.of(_effective_sequences(totals).expand(ratio.shape)),
            "pull/ess": Mean.of(_proximal_ess(totals).expand(ratio.shape)),
            "pull/support": Mean.of(_support(totals).expand(ratio.shape)),
        }

    def _anchor(self, tokens: TokenBatch) -> Tensor:
        if self.anchor == "model":
            return tokens.behavior_logp if tokens.anchor_logp is None else tokens.anchor_logp
        return require(tokens.proximal_logp, "proximal_logp", "pact").detach()

    def _anchor_logps(self, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
        if self.anchor == "model":
            return model_anchor(self.kl, tokens)
        if not self.needs_top_logp:
            return self._anchor(tokens), None
        top = require(tokens.proximal_top_logp, "proximal_top_logp", 'kl="top_k"')
        return self._anchor(tokens), top.detach()

    def _pull(self, totals: Totals) -> Tensor:
        if not isinstance(self.pull, str):
            return torch.full_like(totals.num_tokens, self.pull)
        sequences = totals.num_sequences.clamp(min=1.0)
        deviation = (totals.sums["advantage_squares"] / sequences).sqrt()
        if self.pull == "deviation":
            return deviation
        return deviation * _effective_sequences(totals).clamp(min=1.0).rsqrt()


def _proximal_ess(totals: Totals) -> Tensor:
    """Return e_prox on the data, E[pi / pi_b]^2 / (E[prox / pi_b] E[pi^2 / (prox pi_b)])."""
    squares = totals.sums["anchor_mass"] * totals.sums["second_moment"]
    return (totals.sums["policy_mass"].square() / squares.clamp(min=TINY)).clamp(max=1.0)


def _support(totals: Totals) -> Tensor:
    """Return s: e does not show mass that leaves the support, since all ratios fall alike."""
    mass = totals.sums["policy_mass"] / totals.sums["anchor_mass"].clamp(min=TINY)
    return mass.clamp(max=1.0)


def _effective_sequences(totals: Totals) -> Tensor:
    """Return n_eff: the effective number of sequences of the batch under the current policy."""
    sequences = totals.num_sequences.clamp(min=1.0)
    per_token = _proximal_ess(totals) * _support(totals)
    return sequences * per_token ** (totals.num_tokens / sequences)


def _sources(tokens: TokenBatch) -> Tensor:
    return torch.zeros_like(tokens.sequence) if tokens.source is None else tokens.source


def _ess_of_source(tokens: TokenBatch, totals: Totals) -> Tensor:
    """Return the effective sample size [T] of each token's source."""
    sources, index = _sources(tokens).unique(return_inverse=True)
    ess = [
        effective_sample_size(totals.moments[f"behavior/{source}"]) for source in sources.tolist()
    ]
    return torch.stack(ess)[index] if ess else tokens.logp.new_zeros(0, dtype=torch.float64)
