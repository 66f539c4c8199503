"""Do weight updates arrive? Sends an update of known effect, and reverts it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.models.policy import Policy
from trustbatch.rollout.engine import RolloutEngine

FIRST_SCALE = 0.01
MAX_SCALE = 1.0
WANTED_EFFECT = 0.3
"""mean |change of log-prob| that exceeds the rounding of any precision"""


@dataclass(frozen=True)
class ProbeResult:
    """How the engine reacted to an update of all parameters."""

    share: float
    """share of the update's effect on log-probs that the engine shows, from 0 to 1"""
    residual: float
    """mean |engine - trainer| while the update was in place"""
    residual_after: float
    """the same after the old weights were sent again"""
    reports_version: bool
    """whether the engine reported the version that was sent"""


def probe_updates(
    engine: RolloutEngine,
    policy: Policy,
    sample: Callable[[str], ExaminedTokens],
    logp: Callable[[ExaminedTokens], Tensor],
) -> ProbeResult:
    """Send changed weights, sample, send the old weights, and sample again.

    The policy's weights are restored. With d = change of the tokens' log-probs in the trainer and
    e = what the engine recorded minus the trainer's old value, the share is <e, d> / <d, d>: a
    constant error of the engine is uncorrelated with d and does not affect it.
    """
    version = engine.version
    before = sample("probe-size")
    kept = _Snapshot(policy)
    reference = logp(before)
    try:
        scale = FIRST_SCALE
        kept.perturb(scale)
        while scale < MAX_SCALE and _mean_abs(logp(before) - reference) < WANTED_EFFECT:
            scale *= 2
            kept.perturb(scale)
        engine.load_weights(policy.named_weights(), version=version + 1)
        during = sample("probe-during")
        reports_version = during.provenance.version == version + 1
        changed = logp(during)
    finally:
        kept.restore()
    engine.load_weights(policy.named_weights(), version=version + 2)
    unchanged = logp(during)
    after = sample("probe-after")
    effect, shown = changed - unchanged, during.recorded - unchanged
    return ProbeResult(
        share=float((shown * effect).sum() / effect.square().sum().clamp(min=1e-12)),
        residual=_mean_abs(during.recorded - changed),
        residual_after=_mean_abs(after.recorded - logp(after)),
        reports_version=reports_version,
    )


def _mean_abs(values: Tensor) -> float:
    return float(values[torch.isfinite(values)].abs().mean())


class _Snapshot:
    """A copy of the policy's parameters in host memory; of those that are published, if not all."""

    def __init__(self, policy: Policy) -> None:
        self._parameters = list(policy.model.parameters())
        if policy.adapters is not None and policy.adapters.published_alone:
            self._parameters = [each for _, each in policy.adapters.named_parameters()]
        self._values = [p.detach().to("cpu", copy=True) for p in self._parameters]

    @torch.no_grad()
    def perturb(self, scale: float) -> None:
        """Set every parameter to its copy times 1 + scale * normal noise; zeros to such noise."""
        self.restore()
        for seed, parameter in enumerate(self._parameters):
            generator = torch.Generator(parameter.device).manual_seed(seed)
            noise = torch.empty_like(parameter).normal_(generator=generator)
            if parameter.any():
                parameter.mul_(1.0 + scale * noise)
            else:
                parameter.add_(noise, alpha=scale)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the parameters in place, bit for bit."""
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.copy_(value)
