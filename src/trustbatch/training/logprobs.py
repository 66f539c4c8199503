"""Log-probs of response tokens under a policy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.policy import Policy
from trustbatch.training.entropy_use import EntropyUse


@dataclass(frozen=True)
class TokenLogprobs:
    """What one forward pass says about the T response tokens of a micro-batch."""

    logp: Tensor
    """[T] float32"""
    top_logp: Tensor | None
    """[T, K] float32, of the engine's most likely tokens"""
    entropy: Tensor | None
    """[T] float32"""


def token_logprobs(
    policy: Policy,
    batch: MicroBatch,
    *,
    temperature: float,
    with_top: bool = False,
    entropy: EntropyUse = EntropyUse.NONE,
) -> TokenLogprobs:
    """Evaluate softmax(logits / temperature) at the sampled tokens, and at the recorded top K."""
    logits = response_logits(policy, batch)  # [T, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    top_logp = None
    if with_top:
        assert batch.top_token_ids is not None, "the engine recorded no most likely tokens"
        top_logp = logits.gather(-1, batch.top_token_ids) - normaliser[:, None]
    return TokenLogprobs(
        logp=logits.gather(-1, batch.target[:, None]).squeeze(-1) - normaliser,
        top_logp=top_logp,
        entropy=_entropy(logits, normaliser, entropy),
    )


def response_logits(policy: Policy, batch: MicroBatch) -> Tensor:
    """Return the logits [T, V] that predict each response token."""
    return policy.logits_at(batch.input_ids, batch.packed, batch.index)


def _entropy(logits: Tensor, normaliser: Tensor, use: EntropyUse) -> Tensor | None:
    if use is EntropyUse.NONE:
        return None
    with torch.set_grad_enabled(use is EntropyUse.LEARNED and torch.is_grad_enabled()):
        probability = torch.exp(logits - normaliser[:, None])
        # a token the policy excludes has logit -inf and adds 0, not 0 * -inf
        return normaliser - (probability * logits.nan_to_num(neginf=0.0)).sum(-1)
