"""Search the temperature, top-k and top-p that fit tokens, or recorded log-probs, best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.doctor.distributions import SamplingDistribution
from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.doctor.recompute import Layout, logit_rows
from trustbatch.models.policy import Policy

TEMPERATURES = (
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
    *(1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0),
)
TOP_K = (0, 1, 5, 10, 20, 40, 50, 100)
TOP_P = (1.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
MAX_STRAY = 1e-3
"""share of tokens that rounding may move out of a distribution's support"""
MIN_GAIN = 12.0
"""log-likelihood that each changed setting must gain over the configured one"""
MAX_DISTANCE = 10.0
"""distance of a recorded log-prob from a distribution that excludes its token"""


@dataclass(frozen=True)
class SearchResult:
    """The best distributions among those tried."""

    sampled: SamplingDistribution
    """by the likelihood of the tokens alone"""
    recorded: SamplingDistribution
    """by the distance to the recorded log-probs"""
    recorded_residual: float
    """mean distance to the recorded log-probs"""


def search(
    policy: Policy,
    tokens: ExaminedTokens,
    configured: SamplingDistribution,
    layout: Layout,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
) -> SearchResult:
    """Try every combination of the usual settings and the configured one."""
    temperatures = list(dict.fromkeys((configured.temperature, *temperatures)))
    supports = [
        (top_k, top_p)
        for top_k in dict.fromkeys((configured.top_k, *TOP_K))
        for top_p in dict.fromkeys((configured.top_p, *TOP_P))
    ]
    shape = (len(temperatures), len(supports))
    likelihood = torch.zeros(shape, dtype=torch.float64, device=policy.device)
    distance = torch.zeros_like(likelihood)
    for rows in logit_rows(policy, tokens, layout):
        ordered, _ = rows.logits.sort(dim=-1, descending=True)
        own = rows.logits.gather(-1, rows.target[:, None])
        rank = (rows.logits > own).sum(-1, keepdim=True)  # [R, 1]
        for number, temperature in enumerate(temperatures):
            full, inside = _logp(ordered, own, rank, temperature, supports)
            mixed = torch.logaddexp(inside + math.log1p(-MAX_STRAY), full + math.log(MAX_STRAY))
            likelihood[number] += mixed.double().sum(0)
            gap = (
                (inside - rows.recorded[:, None])
                .abs()
                .nan_to_num(nan=MAX_DISTANCE, posinf=MAX_DISTANCE)
            )
            distance[number] += gap.clamp(max=MAX_DISTANCE).double().sum(0)
    candidates = [
        SamplingDistribution(temperature, *support)
        for temperature in temperatures
        for support in supports
    ]
    departures = torch.tensor([_departures(each, configured) for each in candidates])
    score = likelihood.flatten().cpu() - MIN_GAIN * departures
    residual = distance.flatten().cpu() / tokens.num_tokens
    # among equally good fits, the one nearest to the configuration
    nearest = int((residual.clamp(min=1e-6) * (1.0 + 0.1 * departures)).argmin())
    return SearchResult(
        candidates[int(score.argmax())], candidates[nearest], float(residual[nearest])
    )


def _logp(
    ordered: Tensor,
    own: Tensor,
    rank: Tensor,
    temperature: float,
    supports: Sequence[tuple[int, float]],
) -> tuple[Tensor, Tensor]:
    """Return the targets' log-probs without truncation [R, 1], and under each support [R, S]."""
    scaled = ordered / temperature
    normalizer = scaled.logsumexp(-1, keepdim=True)
    cumulative = (scaled - normalizer).exp().cumsum(-1)  # [R, V]
    size = ordered.shape[-1]
    last = torch.tensor([(min(k, size) if k else size) - 1 for k, _ in supports]).to(ordered.device)
    top_p = torch.tensor([p for _, p in supports]).to(ordered)
    within_k = cumulative[:, last]  # [R, S]
    kept = torch.searchsorted(cumulative, (within_k * top_p).contiguous())
    kept = torch.where(top_p < 1.0, torch.minimum(kept, last), last)
    mass = cumulative.gather(-1, kept)
    full = own / temperature - normalizer
    return full, torch.where(rank <= kept, full - mass.log(), -torch.inf)


def _departures(candidate: SamplingDistribution, configured: SamplingDistribution) -> int:
    """Count the settings that differ from the configured ones."""
    return (
        (candidate.temperature != configured.temperature)
        + (candidate.top_k != configured.top_k)
        + (candidate.top_p != configured.top_p)
    )
