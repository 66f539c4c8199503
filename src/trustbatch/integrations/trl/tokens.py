"""From the tensors of TRL's GRPOTrainer to tokens."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trustbatch.integrations.step_loss import ledger_metrics
from trustbatch.integrations.step_totals import padded_tokens
from trustbatch.objectives import TokenBatch
from trustbatch.objectives.metrics import Metrics


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Return [B, T] which tokens the policy sampled and may learn from."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def tokens_of(
    inputs: Mapping[str, Any], logp: Tensor, *, entropy: Tensor | None = None, truncated: bool
) -> TokenBatch:
    """Return the tokens of a micro-batch of TRL, given the policy's log-probs [B, T].

    The behavior policy is vLLM where it recorded log-probs, otherwise the trainer at generation.
    TRL omits the latter's log-probs where no update can have come since: they are `logp` then.
    """
    sampled = inputs.get("sampling_per_token_logps")
    generated = inputs.get("old_per_token_logps")
    if generated is None:
        generated = logp.detach()
    return padded_tokens(
        logp=logp,
        behavior_logp=generated if sampled is None else sampled,
        advantage=inputs["advantages"],
        mask=loss_mask(inputs),
        proximal_logp=generated,
        reference_logp=inputs.get("ref_per_token_logps"),
        entropy=entropy,
        # the model that sampled, before truncation
        anchor_logp=generated if truncated and sampled is not None else None,
    )


def ledger_of(inputs: Mapping[str, Any], tokens: TokenBatch, *, truncated: bool) -> Metrics:
    """Return the ledger of a micro-batch, as far as TRL's tensors show the causes."""
    if inputs.get("sampling_per_token_logps") is None:
        return ledger_metrics(tokens, engine=None)
    return ledger_metrics(tokens, engine="sampling_and_engine" if truncated else "engine")
