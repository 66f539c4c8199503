"""Sampled tokens under the trainer's own forward pass, a few rows of logits at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import micro_batches
from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.doctor.sampling_distributions import LawStatistics, SamplingDistribution
from trustbatch.models.policy import Policy
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.training.logprobs import response_logits

CHUNK_ELEMENTS = 2**24
"""logits looked at together: 64 MiB in float32, and a handful of copies of it"""


@dataclass(frozen=True)
class Layout:
    """How the trainer packs sequences into forward passes."""

    max_tokens: int
    share_prompts: bool


@dataclass(frozen=True)
class LogitRows:
    """Logits [R, V] in float32 that predict R sampled tokens."""

    logits: Tensor
    target: Tensor
    """[R]"""
    recorded: Tensor
    """[R]"""
    sequence: Tensor
    """[R] number of the sequence that each token belongs to"""
    top_token_ids: Tensor | None
    """[R, K]"""
    recorded_top: Tensor | None
    """[R, K]"""


@torch.no_grad()
def logit_rows(policy: Policy, samples: ExaminedTokens, layout: Layout) -> Iterator[LogitRows]:
    """Yield the logits of all sampled tokens in pieces that fit into memory."""
    for batch in micro_batches(
        samples.sequences,
        max_tokens=layout.max_tokens,
        pad_token_id=policy.pad_token_id,
        packs=policy.packs,
        may_share_prompts=layout.share_prompts and policy.shares_prompts,
    ):
        batch = batch.to(policy.device)
        logits = response_logits(policy, batch)  # [T, V]
        top_ids, top_logp = batch.top_token_ids, batch.behavior_top_logp
        size = max(CHUNK_ELEMENTS // logits.shape[-1], 1)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            yield LogitRows(
                logits[rows].float(),
                batch.target[rows],
                batch.behavior_logp[rows],
                batch.order[batch.sequence[rows]],
                None if top_ids is None else top_ids[rows],
                None if top_logp is None else top_logp[rows],
            )


def recompute(
    policy: Policy, samples: ExaminedTokens, laws: Sequence[SamplingDistribution], layout: Layout
) -> dict[SamplingDistribution, LawStatistics]:
    """Evaluate the sampled tokens under each law of the trainer's logits, in the samples' order."""
    parts: dict[SamplingDistribution, list[Tensor]] = {law: [] for law in laws}
    sequences: list[Tensor] = []
    for rows in logit_rows(policy, samples, layout):
        sequences.append(rows.sequence)
        for law in parts:
            parts[law].append(_statistics(rows, law))
    # stable: the tokens of a sequence stay in their order
    order = torch.cat(sequences).argsort(stable=True)
    return {law: LawStatistics(*torch.cat(part)[order].cpu().T) for law, part in parts.items()}


def _statistics(rows: LogitRows, law: SamplingDistribution) -> Tensor:
    """Return log-prob of the target, mean and variance of the log-prob [R, 3] in float64."""
    logp = sampling_logprobs(rows.logits, law.sampling)
    taken = logp.gather(-1, rows.target[:, None]).squeeze(-1)
    probability = logp.exp()
    finite = logp.masked_fill(~torch.isfinite(logp), 0.0)  # 0 log 0 = 0
    mean = (probability * finite).sum(-1)
    variance = (probability * (finite - mean[:, None]).square()).sum(-1)
    return torch.stack([taken.double(), mean.double(), variance.double()], dim=-1)
