"""Attention over packed tokens on a GPU, as an operator that compiled layers have in their graph.

A graph must not depend on the layout of one batch, so the operator gets a handle of the layout. An
operator has a backward pass of its own: it calls the kernels of torch below autograd.
"""

from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.functional import pad

from trustbatch.models.packing.layout import PackedLayout, layout_of

Tensors = tuple[Tensor, Tensor, Tensor]

_LARGEST_HEAD = 256
"""of the FlashAttention kernels"""
_LARGEST_CUDNN_HEAD = 128
_LENGTH_MULTIPLE = 512
"""long sequences are padded to a multiple of it: cuDNN needs 0.1 s for each new length"""


def fits_kernels(value: Tensor, dtype: torch.dtype, query_head: int) -> bool:
    """Whether the kernels can attend to such values, once they are rounded to `dtype`."""
    return (
        value.is_cuda
        and dtype in (torch.bfloat16, torch.float16)
        and query_head == value.shape[-1] <= _LARGEST_HEAD
        and query_head % 8 == 0
    )


def attend_by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return [N, Hq, D] of query [N, Hq, D], key and value [N, Hkv, D], all in 16 bits."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended, _ = torch.ops.trustbatch.packed_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packed.handle,
        scaling,
        window or 0,
    )
    return attended


@torch.library.custom_op("trustbatch::packed_attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return the result [N, Hq, D] and the logsumexp of the scores [N, Hq], for the backward pass.

    A window of 0 is none.
    """
    packed = layout_of(layout)
    if packed.copies is None:
        return _within_sequences(query, key, value, packed, scaling, window)
    copies = packed.copies
    query, key, value = (copies.spread(part) for part in (query, key, value))
    results = _within_sequences(query, key, value, copies.layout, scaling, window)
    # what the further copies of a prompt see is the same
    attended, logsumexp = (part.index_select(0, copies.own) for part in results)
    return attended, logsumexp


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, layout: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("trustbatch::packed_attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    logsumexp: Tensor,
    layout: Tensor,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    packed = layout_of(layout)
    copies = packed.copies
    parts = (query, key, value, attended, logsumexp)
    if copies is None:
        return _within_sequences_backward(gradient, parts, packed, scaling, window)
    everywhere = gradient.new_zeros(len(copies.token), *gradient.shape[1:])
    everywhere.index_copy_(0, copies.own, gradient)
    parts = tuple(copies.spread(part) for part in parts)
    d_query, d_key, d_value = _within_sequences_backward(
        everywhere, parts, copies.layout, scaling, window
    )
    # queries of the further copies have no gradient
    return d_query.index_select(0, copies.own), copies.add_up(d_key), copies.add_up(d_value)


@_attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    logsumexp: Tensor,
    layout: Tensor,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, layout, ctx.scaling, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, layout)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.trustbatch.packed_attention_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.scaling, ctx.window
    )
    return *gradients, None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


# --- which kernel computes whole sequences -------------------------------------------------------


def _within_sequences(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    window = 0 if window >= packed.longest else window
    lengths = _lengths_for_cudnn(packed, query, key, window)
    if lengths is None:
        attended, logsumexp = _flash(query, key, value, packed, scaling, window)
        return attended.contiguous(), logsumexp.T.contiguous()
    results = []
    for (own_query, own_key, own_value), length in _rows(lengths, query, key, value):
        attended, logsumexp = _cudnn(own_query, own_key, own_value, scaling)
        results.append((_tokens(attended, length), _tokens(logsumexp, length).squeeze(-1)))
    attended, logsumexp = zip(*results, strict=True)
    return _joined(attended), _joined(logsumexp)


def _within_sequences_backward(
    gradient: Tensor, parts: Any, packed: PackedLayout, scaling: float, window: int
) -> Tensors:
    query, key, value, attended, logsumexp = parts
    window = 0 if window >= packed.longest else window
    lengths = _lengths_for_cudnn(packed, query, key, window)
    if lengths is None:
        gradients = _flash_backward(
            gradient,
            (query, key, value, attended, logsumexp.T.contiguous()),
            packed,
            scaling,
            window,
        )
        d_query, d_key, d_value = (each.contiguous() for each in gradients)
        return d_query, d_key, d_value
    results = []
    everything = (gradient, query, key, value, attended, logsumexp[..., None])
    for (d_out, *inputs, of_scores), length in _rows(lengths, *everything):
        found = _cudnn_backward(d_out, (*inputs, of_scores.contiguous()), scaling)
        results.append([_tokens(each, length) for each in found])
    d_query, d_key, d_value = (_joined(each) for each in zip(*results, strict=True))
    return d_query, d_key, d_value


def _lengths_for_cudnn(
    packed: PackedLayout, query: Tensor, key: Tensor, window: int
) -> tuple[tuple[int, int, int], ...] | None:
    """Return rows, length and padding of each call of cuDNN's kernel; None: it is not for them.

    It is nearly twice as fast on Hopper, for sequences of one length and for long ones.
    """
    if window or query.shape[-1] > _LARGEST_CUDNN_HEAD:
        return None
    table = packed.tables[0]
    is_one_long = table.rows == 1 and packed.separate is not None
    if packed.padded is None and not is_one_long:  # a view of the tokens is the only table
        calls: tuple[tuple[int, int, int], ...] = ((table.rows, table.width, 0),)
    elif packed.separate is not None:
        calls = tuple((1, length, -length % _LENGTH_MULTIPLE) for length in packed.separate)
    else:
        return None
    first = [part[: calls[0][1]].transpose(0, 1)[None] for part in (query, key)]
    return calls if _may_use_cudnn(*first) else None


def _may_use_cudnn(query: Tensor, key: Tensor) -> bool:
    is_grouped = query.shape[1] != key.shape[1]
    return can_use_cudnn_attention(SDPAParams(query, key, key, None, 0.0, True, is_grouped))


def _rows(calls: tuple[tuple[int, int, int], ...], *parts: Tensor) -> Any:
    """Yield tokens [N, H, D] as rows [B, H, L, D] of each call, with their own length."""
    sizes = [rows * length for rows, length, _ in calls]
    split = zip(*(part.split(sizes) for part in parts), strict=True)
    for (rows, length, room), own in zip(calls, split, strict=True):
        padded = (pad(part, (0, 0, 0, 0, 0, room)) if room else part for part in own)
        yield [part.unflatten(0, (rows, -1)).transpose(1, 2) for part in padded], length


def _tokens(rows: Tensor, length: int) -> Tensor:
    """Return rows [B, H, L, D] as tokens [N, H, D], without padding."""
    return rows.transpose(1, 2)[:, :length].flatten(0, 1)


def _joined(parts: Any) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


# --- the kernels, below autograd -----------------------------------------------------------------


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return [N, Hq, D] and the logsumexp [Hq, N]."""
    assert packed.starts is not None, "shared prompts need copies"
    attended, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        packed.starts,
        packed.starts,
        packed.longest,
        packed.longest,
        0.0,
        not window,
        False,
        scale=scaling,
        window_size_left=window - 1,  # -1: none
        window_size_right=0,
    )
    return attended, logsumexp


def _flash_backward(
    gradient: Tensor, parts: Any, packed: PackedLayout, scaling: float, window: int
) -> Tensors:
    assert packed.starts is not None, "shared prompts need copies"
    return torch.ops.aten._flash_attention_backward(
        gradient,
        *parts,
        packed.starts,
        packed.starts,
        packed.longest,
        packed.longest,
        0.0,
        not window,
        torch.zeros(2, dtype=torch.uint64, device=gradient.device),  # of dropout, which is 0
        gradient.new_empty(0),
        scale=scaling,
        window_size_left=window - 1,
        window_size_right=0,
    )


def _cudnn(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return [B, Hq, L, D] and the logsumexp [B, Hq, L, 1] of causal attention in each row."""
    attended, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scaling
    )
    return attended, logsumexp


def _cudnn_backward(gradient: Tensor, parts: Any, scaling: float) -> Tensors:
    length = gradient.shape[2]
    seed = torch.zeros((), dtype=torch.int64, device=gradient.device)  # of dropout, which is 0
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        gradient,
        *parts,
        seed,
        seed,
        None,
        None,
        None,
        length,
        length,
        0.0,
        True,
        scale=scaling,
    )
