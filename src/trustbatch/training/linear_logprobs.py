"""Log-probs and entropy of a linear head without its logits [tokens, vocabulary] in memory.

The vocabulary is processed in slices: the logits of all tokens for some thousand ids exist at a
time, and the softmax is normalized online. The backward pass recomputes them, so the cost is four
products of the size of the head: logits, logits again, and the gradients of both operands.

Slices of the vocabulary, not of the tokens, because
- the gradient of a slice of the weight is then one product over all tokens, summed in float32
  within the product; slices of tokens would have to accumulate into a float32 [V, h] each time,
  instead of the much smaller [T, h];
- both gradients are then products with a large output and a long sum, which fill a GPU; d_hidden
  of a thousand tokens at h = 1024 has fewer tiles than an H200 has multiprocessors.

A product and one pass over its result, not one kernel for both: the passes read 4 bytes per
logit forward, and read 4 and write 2 backward, while the four products take 8 h operations. At 4.8
TB/s and about 680 TFLOP/s, as on an H200, that adds 17% at h = 1024 and 7% at h = 2560. A kernel
that keeps the logits on the chip would have to come that close to cuBLAS to be faster, also in the
backward pass, where two further products along different axes need each tile of logits.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trustbatch.models.products import multiply
from trustbatch.training import logprob_passes
from trustbatch.training.logprob_passes import OutputGradients, SliceStatistics

CPU_SLICE_BYTES = 32 * 2**20
"""of a slice of logits on a CPU: models that are trained there need one slice or a few"""
GPU_SLICE_BYTES = 2**30
"""of a slice of logits on a GPU; the backward pass needs half as much again, in bfloat16"""
SLICE_MULTIPLE = 128
"""slices are multiples of it, so that rows stay aligned for tensor cores"""


class EntropyUse(Enum):
    """Whether the entropy of the policy is computed, and whether it has a gradient."""

    NONE = 0
    REPORTED = 1
    LEARNED = 2


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    *,
    temperature: float,
    top_token_ids: Tensor | None = None,
    entropy: EntropyUse = EntropyUse.NONE,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Evaluate softmax((hidden weight^T + bias) / temperature) at the given tokens.

    Args:
        hidden: [T, h], the input of the head.
        weight: [V, h] of the head.
        bias: [V]; -inf excludes a token.
        token_ids: [T] the sampled tokens.
        temperature: Divides the logits.
        top_token_ids: [T, K] further tokens, which may repeat each other and the sampled one.
        entropy: Whether to return the entropy, and whether it has a gradient.
        precision: The dtype of the operands of all products, as with autocast (default: their
            own). Products are summed and logits kept in at least float32, also under autocast.

    Returns:
        logp [T], top_logp [T, K] and entropy [T], in float32 (float64 for inputs in float64). An id
        outside the vocabulary has the log-prob NaN.
    """
    ids = token_ids[:, None]
    if top_token_ids is not None:
        ids = torch.cat((ids, top_token_ids), 1)
    precision = precision or torch.promote_types(hidden.dtype, weight.dtype)
    logp, entropies = _LinearLogprobs.apply(
        hidden, weight, bias, ids.contiguous(), temperature, entropy, precision
    )
    # copies, since FSDP warns about views among the outputs of a module
    top_logp = None if top_token_ids is None else logp[:, 1:].clone()
    return logp[:, 0].clone(), top_logp, entropies


def linear_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, precision: torch.dtype | None = None
) -> Tensor:
    """Return all logits [T, V] of the head, computed as in `linear_logprobs`."""
    head = _Head(weight, bias, precision or torch.promote_types(hidden.dtype, weight.dtype))
    logits = head.logits(head.operand(hidden), head.operand(weight))
    return logits if head.bias is None else logits + head.bias


class _LinearLogprobs(torch.autograd.Function):
    """(logp [T, J], entropy [T] or None) of the J ids of each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        entropy_use: EntropyUse,
        precision: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        head = _Head(weight, bias, precision)
        rows = head.operand(hidden)
        statistics = SliceStatistics.empty(
            ids, head.dtype, with_entropy=entropy_use is not EntropyUse.NONE
        )
        for first, last in _slices(len(hidden), len(weight), head.dtype, weight.device):
            logits = head.logits(rows, head.operand(weight[first:last]))
            _passes(logits).add_slice(
                statistics,
                logits,
                head.bias_slice(first, last),
                first=first,
                temperature=temperature,
            )
            del logits  # frees it before the next slice is computed
        normalizer = statistics.normalizer()
        logp = statistics.picked - normalizer[:, None]
        entropy = None if entropy_use is EntropyUse.NONE else statistics.entropy()
        if entropy_use is EntropyUse.REPORTED:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        learned = entropy if entropy_use is EntropyUse.LEARNED else None
        ctx.save_for_backward(hidden, weight, bias, ids, logp, normalizer, learned)
        ctx.temperature, ctx.precision = temperature, precision
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        d_logp, d_entropy = gradients
        hidden, weight, bias, ids, logp, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if d_logp is None and d_entropy is None:
            return (None,) * len(ctx.needs_input_grad)
        outputs = OutputGradients(
            ids=ids,
            logp=logp,
            d_logp=torch.zeros_like(logp) if d_logp is None else d_logp.contiguous(),
            normalizer=normalizer,
            entropy=None if d_entropy is None else entropy,
            d_entropy=None if d_entropy is None else d_entropy.contiguous(),
        )
        head = _Head(weight, bias, ctx.precision)
        rows = head.operand(hidden)
        d_hidden = torch.zeros_like(hidden, dtype=head.dtype) if needs_hidden else None
        d_weight = torch.zeros_like(weight) if needs_weight else None
        d_bias = torch.zeros_like(bias) if needs_bias else None
        for first, last in _slices(len(hidden), len(weight), head.dtype, weight.device):
            columns = head.operand(weight[first:last])
            logits = head.logits(rows, columns)
            d_logits = _passes(logits).logit_gradients(
                outputs,
                logits,
                head.bias_slice(first, last),
                first=first,
                temperature=ctx.temperature,
                dtype=ctx.precision,
            )
            del logits
            d_logits = head.operand(d_logits)
            if d_hidden is not None:
                d_hidden += head.product(d_logits, columns)
            if d_weight is not None:
                d_weight[first:last] = head.product(d_logits.T, rows)
            if d_bias is not None:
                d_bias[first:last] = d_logits.sum(0, dtype=head.dtype)
            del d_logits
        if d_hidden is not None:
            d_hidden = d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, *(None,) * (len(ctx.needs_input_grad) - 3)


class _Head:
    """Products of the head, with operands in one precision and results in at least float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: torch.dtype) -> None:
        self.precision = precision
        self.dtype = torch.promote_types(precision, torch.float32)
        self.device = weight.device.type
        self.bias = None if bias is None else bias.to(self.dtype)

    def operand(self, tensor: Tensor) -> Tensor:
        """Round a tensor to the precision."""
        rounded = tensor.to(self.precision)
        # only CUDA multiplies bfloat16 into float32; elsewhere the rounded operands are float32
        return rounded if self.device == "cuda" else rounded.to(self.dtype)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the product of two operands, unrounded."""
        with torch.autocast(self.device, enabled=False):
            return multiply(left, right)

    def logits(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return logits [T, n] without the bias."""
        return self.product(rows, columns.T)

    def bias_slice(self, first: int, last: int) -> Tensor | None:
        """Return the bias [n] of some ids."""
        return None if self.bias is None else self.bias[first:last]


def _slices(
    num_tokens: int, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, int]]:
    """Yield the first id and the end of each slice; none without tokens.

    Forward and backward pass have the same slices, so that they compute the same logits.
    """
    if num_tokens == 0:
        return
    available = GPU_SLICE_BYTES if device.type == "cuda" else CPU_SLICE_BYTES
    width = available // (num_tokens * dtype.itemsize)
    width = max(width // SLICE_MULTIPLE, 1) * SLICE_MULTIPLE
    for first in range(0, vocabulary, width):
        yield first, min(first + width, vocabulary)


def _passes(logits: Tensor) -> Any:
    """Return the module that has `add_slice` and `logit_gradients` for these logits."""
    if logits.is_cuda and logits.dtype == torch.float32:
        from trustbatch.training import logprob_kernels

        return logprob_kernels
    return logprob_passes
