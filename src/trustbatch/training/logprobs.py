"""Log-probs of response tokens under a policy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.models.policy import Policy
from trustbatch.training.linear_logprobs import EntropyUse, linear_logits, linear_logprobs


@dataclass(frozen=True)
class TokenLogprobs:
    """The result of one forward pass for the T response tokens of a micro-batch."""

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
    top_token_ids = None
    if with_top:
        assert batch.top_token_ids is not None, "the engine recorded no most likely tokens"
        top_token_ids = batch.top_token_ids
    evaluate = _with_all_logits if policy.head is None else _without_logits
    return TokenLogprobs(*policy.root(evaluate, policy, batch, temperature, top_token_ids, entropy))


_Evaluated = tuple[Tensor, Tensor | None, Tensor | None]


def _without_logits(
    policy: Policy,
    batch: MicroBatch,
    temperature: float,
    top_token_ids: Tensor | None,
    entropy: EntropyUse,
) -> _Evaluated:
    head = policy.head
    assert head is not None
    return linear_logprobs(
        policy.hidden_states(batch.input_ids, batch.packed, batch.index),
        head.weight,
        head.bias,
        batch.target,
        temperature=temperature,
        top_token_ids=top_token_ids,
        entropy=entropy,
        precision=policy.product_dtype,
    )


def response_logits(policy: Policy, batch: MicroBatch) -> Tensor:
    """Return the logits [T, V] that predict the response tokens, as `token_logprobs` uses them."""
    head = policy.head
    if head is None:
        logits = policy.logits_at(batch.input_ids, batch.packed, batch.index)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
    hidden = policy.hidden_states(batch.input_ids, batch.packed, batch.index)
    return linear_logits(hidden, head.weight, head.bias, precision=policy.product_dtype)


def _with_all_logits(
    policy: Policy,
    batch: MicroBatch,
    temperature: float,
    top_token_ids: Tensor | None,
    entropy: EntropyUse,
) -> _Evaluated:
    """Evaluate a model that caps or scales its logits, with all logits in memory."""
    logits = response_logits(policy, batch) / temperature
    normalizer = logits.logsumexp(-1)
    top_logp = None
    if top_token_ids is not None:
        top_logp = logits.gather(-1, top_token_ids) - normalizer[:, None]
    logp = logits.gather(-1, batch.target[:, None]).squeeze(-1) - normalizer
    return logp, top_logp, _entropy(logits, normalizer, entropy)


def _entropy(logits: Tensor, normalizer: Tensor, use: EntropyUse) -> Tensor | None:
    if use is EntropyUse.NONE:
        return None
    with torch.set_grad_enabled(use is EntropyUse.LEARNED and torch.is_grad_enabled()):
        probability = torch.exp(logits - normalizer[:, None])
        # a token that the policy excludes has logit -inf and adds 0, not 0 * -inf
        return normalizer - (probability * logits.nan_to_num(neginf=0.0)).sum(-1)
