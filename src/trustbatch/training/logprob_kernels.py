"""The functions of `logprob_passes` as Triton kernels: each reads the float32 logits once."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportMissingImports=false
# (Triton comes with torch on machines with a GPU; it types kernels as plain functions)

import torch
import triton
import triton.language as tl
from torch import Tensor

from trustbatch.training.logprob_passes import LOWEST_LOGP, OutputGradients, SliceStatistics

LOWEST = tl.constexpr(LOWEST_LOGP)
STATISTICS_BLOCK = 8192
GRADIENT_BLOCK = 4096


@triton.jit
def _add_slice(
    logits,
    bias,
    ids,
    picked,
    maximum,
    total,
    weighted,
    first,
    width,
    num_ids,
    inverse_temperature,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, IDS)
    column = tl.load(ids + row * num_ids + slots, mask=slots < num_ids, other=-1) - first
    here = (column >= 0) & (column < width)
    chosen = tl.load(logits + row * width + column, mask=here, other=0.0)
    if bias is not None:
        chosen += tl.load(bias + column, mask=here, other=0.0)
    tl.store(picked + row * num_ids + slots, chosen * inverse_temperature, mask=here)

    peak = tl.load(maximum + row)
    mass = tl.load(total + row)
    moment = 0.0
    if weighted is not None:
        moment = tl.load(weighted + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(logits + row * width + columns, mask=inside, other=-float("inf"))
        if bias is not None:
            x += tl.load(bias + columns, mask=inside, other=0.0)
        x *= inverse_temperature
        higher = tl.maximum(peak, tl.max(x, 0))
        shift = peak - higher
        shrink = tl.exp(shift)
        x -= higher
        weight = tl.exp(x)
        if weighted is not None:
            moment = (moment + shift * mass) * shrink + tl.sum(weight * tl.maximum(x, LOWEST), 0)
        mass = mass * shrink + tl.sum(weight, 0)
        peak = higher
    tl.store(maximum + row, peak)
    tl.store(total + row, mass)
    if weighted is not None:
        tl.store(weighted + row, moment)


def add_slice(
    statistics: SliceStatistics,
    logits: Tensor,
    bias: Tensor | None,
    *,
    first: int,
    temperature: float,
) -> None:
    """Add the slice [T, n] of the ids from `first` on."""
    num_tokens, width = logits.shape
    num_ids = statistics.ids.shape[1]
    _add_slice[(num_tokens,)](
        logits,
        bias,
        statistics.ids,
        statistics.picked,
        statistics.maximum,
        statistics.total,
        statistics.weighted,
        first,
        width,
        num_ids,
        1.0 / temperature,
        IDS=triton.next_power_of_2(num_ids),
        BLOCK=min(triton.next_power_of_2(width), STATISTICS_BLOCK),
        num_warps=8,
    )


@triton.jit
def _softmax_gradients(
    logits,
    bias,
    gradients,
    normalizer,
    pulls,
    entropy,
    d_entropy,
    width,
    num_blocks,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(logits + row * width + columns, mask=inside, other=0.0)
    if bias is not None:
        x += tl.load(bias + columns, mask=inside, other=0.0)
    log_p = x * inverse_temperature - tl.load(normalizer + row)
    pull = tl.load(pulls + row)
    if entropy is not None:
        distance = tl.maximum(log_p, LOWEST) + tl.load(entropy + row)
        pull += tl.load(d_entropy + row) * distance
    gradient = -tl.exp(log_p) * pull * inverse_temperature
    tl.store(
        gradients + row * width + columns,
        gradient.to(gradients.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _picked_gradients(
    gradients,
    ids,
    logp,
    d_logp,
    pulls,
    entropy,
    d_entropy,
    first,
    width,
    num_ids,
    inverse_temperature,
    IDS: tl.constexpr,
):
    # The whole value is recomputed instead of added to the stored one, which was rounded: where p
    # is almost 1, the rounding of -p exceeds 1 - p. A repeated id is stored twice, with one value.
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, IDS)
    places = row * num_ids + slots
    inside = slots < num_ids
    token = tl.load(ids + places, mask=inside, other=-1)
    column = token - first
    here = (column >= 0) & (column < width)
    log_p = tl.load(logp + places, mask=inside, other=0.0)
    given = tl.load(d_logp + places, mask=inside, other=0.0)
    own = tl.sum(tl.where(token[:, None] == token[None, :], given[None, :], 0.0), 1)
    pull = tl.load(pulls + row)
    if entropy is not None:
        distance = tl.maximum(log_p, LOWEST) + tl.load(entropy + row)
        pull += tl.load(d_entropy + row) * distance
    gradient = (own - tl.exp(log_p) * pull) * inverse_temperature
    tl.store(
        gradients + row * width + column,
        gradient.to(gradients.dtype.element_ty),
        mask=here,
    )


def logit_gradients(
    outputs: OutputGradients,
    logits: Tensor,
    bias: Tensor | None,
    *,
    first: int,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient [T, n] in `dtype` with respect to a slice; may overwrite `logits`."""
    num_tokens, width = logits.shape
    gradients = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    pulls = outputs.d_logp.sum(-1)
    block = min(triton.next_power_of_2(width), GRADIENT_BLOCK)
    num_blocks = triton.cdiv(width, block)
    _softmax_gradients[(num_tokens * num_blocks,)](
        logits,
        bias,
        gradients,
        outputs.normalizer,
        pulls,
        outputs.entropy,
        outputs.d_entropy,
        width,
        num_blocks,
        1.0 / temperature,
        BLOCK=block,
        num_warps=8,
    )
    num_ids = outputs.ids.shape[1]
    _picked_gradients[(num_tokens,)](
        gradients,
        outputs.ids,
        outputs.logp,
        outputs.d_logp,
        pulls,
        outputs.entropy,
        outputs.d_entropy,
        first,
        width,
        num_ids,
        1.0 / temperature,
        IDS=triton.next_power_of_2(num_ids),
        num_warps=1,
    )
    return gradients
