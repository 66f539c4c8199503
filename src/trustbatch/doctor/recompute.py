"""The trainer's forward pass over sampled tokens, in any precision, a few logits at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trustbatch.batching.micro_batches import micro_batches
from trustbatch.doctor.distributions import SamplingDistribution, TokenStatistics
from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.models.policy import Policy
from trustbatch.models.quantization.layer import QuantizedLinear
from trustbatch.rollout.native.linear import round_rows
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.training.logprobs import response_logits


@contextmanager
def in_float32(policy: Policy) -> Iterator[None]:
    """Compute matrix products in float32 for the time of a `with` block."""
    precision, policy.precision = policy.precision, "float32"
    rounded = (p for p in policy.model.parameters() if p.dtype == torch.bfloat16)
    try:
        with other_values(rounded, lambda p: p.float()):
            yield
    finally:
        policy.precision = precision


@contextmanager
def in_bfloat16(policy: Policy) -> Iterator[None]:
    """Keep all parameters and activations in bfloat16, as inference engines do."""
    with in_float32(policy), other_values(policy.model.parameters(), lambda p: p.bfloat16()):
        yield


@contextmanager
def in_fp8(policy: Policy) -> Iterator[None]:
    """Round weights and inputs of linear layers, except the output head, to e4m3.

    Quantized weights are left as they are: they are made anew in each pass.
    """
    head = policy.model.get_output_embeddings()
    linears = [
        module
        for module in policy.model.modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    plain = [module for module in linears if not isinstance(module, QuantizedLinear)]
    hooks = [module.register_forward_pre_hook(_round_input) for module in linears]
    try:
        # engines quantize the bfloat16 values of the weights
        with other_values(
            (module.weight for module in plain), lambda w: round_rows(w.bfloat16().float())
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def in_fp8_kv(policy: Policy) -> Iterator[None]:
    """Round keys and values, after the rotary embedding, to e4m3."""
    implementation = policy.model.config._attn_implementation
    attention = ALL_ATTENTION_FUNCTIONS[implementation]

    def rounded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any,
                **options: Any) -> Any:  # fmt: skip
        return attention(module, query, round_rows(key), round_rows(value), *rest, **options)

    ALL_ATTENTION_FUNCTIONS[implementation] = rounded
    try:
        yield
    finally:
        # what this instance was given hides what is registered for all
        del ALL_ATTENTION_FUNCTIONS[implementation]


PRECISIONS: dict[str, Callable[[Policy], AbstractContextManager[Any]]] = {
    "float32": in_float32,
    "bfloat16": in_bfloat16,
    "fp8": in_fp8,
}
"""by the names that engines use for their precision"""
FP8_KV = "fp8-kv"
"""in its place where only keys and values are FP8"""


def in_precision(policy: Policy, precision: str | None) -> AbstractContextManager[Any]:
    """Return the context manager of a precision, or of `FP8_KV`; None is the trainer's own."""
    if precision == FP8_KV:
        return in_fp8_kv(policy)
    return PRECISIONS[precision](policy) if precision else nullcontext()


def _round_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (round_rows(inputs[0]), *inputs[1:])


@contextmanager
def other_values(parameters: Iterator[Any], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give parameters other values for a while; their storage is restored afterwards."""
    kept: list[tuple[Any, Tensor]] = []
    try:
        for parameter in parameters:
            own = parameter.data
            kept.append((parameter, own))
            parameter.data = change(own)
        yield
    finally:
        for parameter, own in kept:
            parameter.data = own


CHUNK_ELEMENTS = 2**24
"""logits per piece: 64 MiB in float32, and a few copies of it"""


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
    """[R] index of the sequence that each token belongs to"""
    top_token_ids: Tensor | None
    """[R, K]"""
    recorded_top: Tensor | None
    """[R, K]"""


@torch.no_grad()
def logit_rows(policy: Policy, tokens: ExaminedTokens, layout: Layout) -> Iterator[LogitRows]:
    """Yield the logits of all tokens in pieces that fit into memory."""
    for batch in micro_batches(
        tokens.sequences,
        max_tokens=layout.max_tokens,
        pad_token_id=policy.pad_token_id,
        packs=policy.packs,
        may_share_prompts=layout.share_prompts,
        copies_prompts=policy.copies_prompts,
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
    policy: Policy,
    tokens: ExaminedTokens,
    distributions: Sequence[SamplingDistribution],
    layout: Layout,
) -> dict[SamplingDistribution, TokenStatistics]:
    """Evaluate tokens under each distribution of the trainer's logits, in the tokens' order."""
    parts: dict[SamplingDistribution, list[Tensor]] = {each: [] for each in distributions}
    sequences: list[Tensor] = []
    for rows in logit_rows(policy, tokens, layout):
        sequences.append(rows.sequence)
        for distribution, part in parts.items():
            part.append(_statistics(rows, distribution))
    # stable: keeps the tokens of a sequence in order
    order = torch.cat(sequences).argsort(stable=True)
    return {each: TokenStatistics(*torch.cat(part)[order].cpu().T) for each, part in parts.items()}


def _statistics(rows: LogitRows, distribution: SamplingDistribution) -> Tensor:
    """Return log-prob of the target, mean and variance of the log-prob [R, 3] in float64."""
    logp = sampling_logprobs(rows.logits, distribution.sampling)
    taken = logp.gather(-1, rows.target[:, None]).squeeze(-1)
    probability = logp.exp()
    finite = logp.masked_fill(~torch.isfinite(logp), 0.0)  # 0 log 0 = 0
    mean = (probability * finite).sum(-1)
    variance = (probability * (finite - mean[:, None]).square()).sum(-1)
    return torch.stack([taken.double(), mean.double(), variance.double()], dim=-1)
