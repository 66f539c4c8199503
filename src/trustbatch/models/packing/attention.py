"""Attention over packed tokens, registered as an attention implementation of transformers.

A model with it behaves as with `sdpa`, unless a forward pass has a `packed` layout among its
arguments. The layout reaches each layer's attention, also through gradient checkpointing and
compilation, since it is an argument and not global state.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trustbatch.models.packing.layout import PackedLayout, PromptCopies, Table
from trustbatch.models.packing.operator import attend_by_kernels, fits_kernels

NAME = "trustbatch_packed"
REPLACES = "sdpa"
"""the implementation that a model must have, and uses where nothing is packed"""

_BY_SPEED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""GPU kernels; torch's own order prefers others to cuDNN's, which is nearly 2x faster on Hopper"""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend from query [1, Hq, N, D] to key and value [1, Hkv, N, D] within each segment."""
    # rotary embeddings leave float32 where matrix products run in less
    dtype = value.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    if packed is not None and fits_kernels(value, dtype, query.shape[-1]):
        query, key, value = (
            part.squeeze(0).transpose(0, 1).to(dtype) for part in (query, key, value)
        )
        attended = attend_by_kernels(query, key, value, packed, scaling, sliding_window)
        return attended[None], None
    return _outside_of_graphs(
        module,
        query,  # type: ignore[call-arg]
        key,
        value,
        attention_mask,
        packed=packed,
        scaling=scaling,
        sliding_window=sliding_window,
        dtype=dtype,
        **options,
    )


@torch.compiler.disable  # a compiled graph must not depend on the layout of one batch
def _outside_of_graphs(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout | None,
    scaling: float | None,
    sliding_window: int | None,
    dtype: torch.dtype,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if packed is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            **options,
        )
    query, key, value = (part.to(dtype) for part in (query, key, value))
    attended = _attend(query, key, value, packed, scaling, sliding_window)
    # always contiguous and never a view, since compiled layers depend on the memory layout
    attended = attended.contiguous()
    return torch.ops.aten._unsafe_view(attended, (1, *attended.shape)), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return [N, Hq, D]."""
    if packed.copies is not None:
        return _attend_to_copies(query, key, value, packed.copies, scaling, window)
    if window is not None and window >= packed.longest:
        window = None
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    return _attend_in_tables(query, key, value, packed, scaling, window)


def _attend_to_copies(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    copies: PromptCopies,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return [N, Hq, D] from attention within whole sequences."""
    query, key, value = (
        _ToCopies.apply(part.squeeze(0).transpose(0, 1), copies).transpose(0, 1)[None]  # type: ignore[attr-defined]
        for part in (query, key, value)
    )
    attended = _attend(query, key, value, copies.layout, scaling, window)
    # what the further copies of a prompt see is the same, and goes nowhere
    return _FromSlots.apply(attended, copies.own)  # type: ignore[return-value]


AttentionInterface.register(NAME, packed_attention)
# only calls without a layout need a mask; for the others see `no_mask`
AttentionMaskInterface.register(NAME, sdpa_mask)


def no_mask(device: torch.device) -> Tensor:
    """Return a dummy mask, so that a model does not create one; packed attention ignores it."""
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)


def _attend_in_tables(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return [N, Hq, D] of query [N, Hq, D], key and value [N, Hkv, D], padded only in here."""
    queries, keys, values = (_to_tables(part, packed) for part in (query, key, value))
    outputs = []
    for number, table in enumerate(packed.tables):
        k, v = keys[number], values[number]
        if table.before is not None:
            prompts, of_row = table.before.table, table.before.of_row
            k = torch.cat([keys[prompts].index_select(0, of_row), k], dim=1)
            v = torch.cat([values[prompts].index_select(0, of_row), v], dim=1)
        outputs.append(_attend_in_rows(queries[number], k, v, table, scaling, window))
    if packed.padded is None:
        return outputs[0].flatten(0, 1)
    assert packed.slot is not None
    return _FromSlots.apply(torch.cat([part.flatten(0, 1) for part in outputs]), packed.slot)  # type: ignore[return-value]


def _attend_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Table,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return [B, L, Hq, D] of query [B, L, Hq, D], key and value [B, K, Hkv, D]."""
    mask = table.mask_within(window, query.device)
    with sdpa_kernel(_BY_SPEED, set_priority=True) if query.is_cuda else nullcontext():
        return scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[2] != key.shape[2],
        ).transpose(1, 2)


def _to_tables(tokens: Tensor, packed: PackedLayout) -> list[Tensor]:
    """Return tokens [N, H, D] as one [B, L, H, D] per table."""
    if packed.padded is None:
        slots = [tokens]
    else:
        everywhere: Tensor = _ToSlots.apply(tokens, packed.padded, packed.slot)  # type: ignore[assignment]
        slots = everywhere.split([table.rows * table.width for table in packed.tables])
    return [
        part.unflatten(0, (table.rows, table.width))
        for part, table in zip(slots, packed.tables, strict=True)
    ]


class _ToSlots(torch.autograd.Function):
    """Copy tokens to their slots in the tables; padding slots never have a gradient.

    So the backward pass needs no sum, and autograd's own would be slow on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, padded: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return tokens.index_select(0, padded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return gradients[0].index_select(0, slot), None, None


class _ToCopies(torch.autograd.Function):
    """Copy tokens to their places in whole sequences."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, copies: PromptCopies) -> Tensor:
        ctx.copies = copies
        return copies.spread(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.add_up(gradients[0]), None


class _FromSlots(torch.autograd.Function):
    """Gather tokens from their slots in the tables."""

    @staticmethod
    def forward(ctx: Any, everywhere: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.num_slots = len(everywhere)
        return everywhere.index_select(0, slot)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (slot,), (gradient,) = ctx.saved_tensors, gradients
        everywhere = gradient.new_zeros(ctx.num_slots, *gradient.shape[1:])
        return everywhere.index_copy_(0, slot, gradient), None
