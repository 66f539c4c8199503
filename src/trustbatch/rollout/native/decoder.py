"""The decoder of the native engine: its forward pass over the trainer's own parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.errors import ConfigError
from trustbatch.rollout.native import operations
from trustbatch.rollout.native.architecture import Architecture
from trustbatch.rollout.native.cache import Cache, CacheFullError, HeadNorms
from trustbatch.rollout.native.dense_cache import DenseCache
from trustbatch.rollout.native.linear import Linear, build_linear
from trustbatch.rollout.native.packed_prompts import pack_prompts
from trustbatch.rollout.native.workspace import Workspace

ROTARY_STEP = 1024
"""positions by which the table of rotary embeddings grows"""


class Decoder(Protocol):
    """What a running batch needs: prefill of prompts, then steps of one token per row."""

    joins_running: bool
    """whether prompts can be added while rows are running"""
    uses_cuda_graphs: bool
    """whether a step is captured once and replayed"""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that one prefill may have, including padding."""
        ...

    @property
    def address(self) -> tuple[int, int]:
        """Changes whenever a tensor that a CUDA graph reads has moved."""
        ...

    @property
    def shares_pages(self) -> bool:
        """Whether a step reads some pages for several rows at once, with kernels of its own."""
        ...

    def refresh(self) -> None:
        """Read the current values of the trainer's parameters."""
        ...

    def clear(self) -> None:
        """Drop the cache and free its memory."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], copies: list[int]) -> Tensor:
        """Add copies[p] rows that continue prompt p; return the logits [P, V] after each prompt."""
        ...

    def reserve(self, num_steps: int, most_steps: int) -> None:
        """Reserve memory for `num_steps` more tokens in every row; it gets at most `most_steps`."""
        ...

    def step(self, token_ids: Tensor, position: Tensor) -> Tensor:
        """Feed one token per row, at its position; return the next logits [n, V]."""
        ...

    def advance(self, num_steps: int) -> None:
        """Advance all rows by `num_steps` tokens."""
        ...

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this order."""
        ...


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    norms: HeadNorms | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaDecoder:
    """Decodes models of the Llama family, with the cache that suits the device."""

    joins_running = True

    def __init__(
        self, architecture: Architecture, *, precision: str, kv_precision: str, max_rows: int
    ) -> None:
        model = architecture.model
        self.architecture = architecture
        self.max_rows = max_rows
        self.embedding: Tensor = model.model.embed_tokens.weight
        self.device = self.embedding.device
        self.uses_cuda_graphs = self.device.type == "cuda"
        base = precision
        if precision == "fp8":
            base = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype: torch.dtype = getattr(torch, base)
        self.layers = [_read_layer(layer, precision) for layer in architecture.layers]
        self.final_norm: Tensor = model.model.norm.weight
        self.head = build_linear([model.lm_head], precision=precision, is_head=True)
        self.operations: ModuleType = operations
        if self.device.type == "cuda":
            from trustbatch.rollout.native import kernels

            self.operations = kernels
        self.rotary = architecture.rotary(ROTARY_STEP, self.device)
        self.workspace = Workspace(architecture, self.device)
        self.cache = self._new_cache(is_fp8=kv_precision == "fp8")
        self._moves = 0

    @property
    def address(self) -> tuple[int, int]:
        """Changes whenever a tensor that a CUDA graph reads has moved."""
        return self._moves, self.cache.address

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that one prefill may have, by the memory that was free."""
        return self.workspace.prefill_tokens

    @property
    def shares_pages(self) -> bool:
        """Whether a step reads some pages for several rows at once, with kernels of its own."""
        return self.cache.shares_pages

    def refresh(self) -> None:
        """Read the current values of the trainer's parameters."""
        self.workspace.fit()
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.refresh()
        self.head.refresh()

    def clear(self) -> None:
        """Drop the cache and free its memory."""
        self.cache.clear()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], copies: list[int]) -> Tensor:
        """Add copies[p] rows that continue prompt p; return the logits [P, V] after each prompt."""
        packed = pack_prompts(prompts, self.device)
        self._extend_rotary(packed.longest)
        cosines, sines = (part[packed.position_of_row][:, None] for part in self.rotary)
        self.cache.add_prompts([len(prompt) for prompt in prompts], copies)
        heads = self.architecture.heads
        num_rotated = heads.num_query + heads.num_kv

        def attend(number: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            parts = operations.split_heads(qkv, heads, norms)
            rotated = operations.rotate(parts[:, :num_rotated], cosines, sines, self.dtype)
            query, key, value = (
                part[packed.row_of_token].transpose(1, 2)
                for part in (
                    rotated[:, : heads.num_query],
                    rotated[:, heads.num_query :],
                    parts[:, num_rotated:].to(self.dtype),
                )
            )
            key, value = self.cache.store_prompts(number, key, value)
            # padding is on the right, where the causal mask hides it
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            return out.transpose(1, 2).flatten(0, 1)[packed.token_of_row].flatten(1)

        try:
            residual, delta = self._layers(packed.token_ids, attend)
            logits = self._logits(residual[packed.last_rows], delta[packed.last_rows])
        except torch.OutOfMemoryError as error:
            self.cache.drop_prompts()
            raise CacheFullError from error
        self.cache.finish_prompts()
        return logits

    def reserve(self, num_steps: int, most_steps: int) -> None:
        """Reserve memory for `num_steps` more tokens in every row; it gets at most `most_steps`."""
        self.cache.reserve(num_steps, most_steps)
        self._extend_rotary(self.cache.longest + num_steps)

    def advance(self, num_steps: int) -> None:
        """Advance all rows by `num_steps` tokens."""
        self.cache.advance(num_steps)

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this order."""
        self.cache.keep(index)

    @torch.no_grad()
    def step(self, token_ids: Tensor, position: Tensor) -> Tensor:
        """Feed one token per row, at its position; return the next logits [n, V]."""

        def attend(number: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
            return self.cache.attend(number, qkv, norms, self.rotary, position)

        return self._logits(*self._layers(token_ids, attend))

    def _layers(
        self, token_ids: Tensor, attend: Callable[[int, Tensor, HeadNorms | None], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream [n, h] before the last MLP, and what that adds to it."""
        residual = functional.embedding(token_ids, self.embedding).float()
        delta = None
        for number, layer in enumerate(self.layers):
            normed = self._add_norm(residual, delta, layer.attention_norm)
            delta = layer.output(attend(number, layer.qkv(normed), layer.norms))
            normed = self._add_norm(residual, delta, layer.mlp_norm)
            delta = layer.down(self.operations.silu_mul(layer.gate_up(normed)))
        assert delta is not None
        return residual, delta

    def _logits(self, residual: Tensor, delta: Tensor) -> Tensor:
        return self.head(self._add_norm(residual, delta, self.final_norm))

    def _add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        epsilon = self.architecture.heads.epsilon
        return self.operations.add_rms_norm(residual, delta, weight, epsilon, self.dtype)

    def _extend_rotary(self, num_positions: int) -> None:
        if num_positions > len(self.rotary[0]):
            rounded = -(-num_positions // ROTARY_STEP) * ROTARY_STEP
            self.rotary = self.architecture.rotary(rounded, self.device)
            self._moves += 1

    def _new_cache(self, *, is_fp8: bool) -> Cache:
        num_layers = len(self.layers)
        if self.device.type != "cuda":
            return DenseCache(self.architecture.heads, num_layers, self.dtype, is_fp8=is_fp8)
        from trustbatch.rollout.native.paged_cache import PagedCache

        if is_fp8 and torch.cuda.get_device_capability(self.device) < (8, 9):
            raise ConfigError(
                'rollout.kv_precision = "fp8" needs a GPU that converts FP8 (compute capability '
                "8.9 or newer): remove it on this one."
            )
        return PagedCache(
            self.architecture.heads,
            num_layers,
            self.dtype,
            device=self.device,
            max_rows=self.max_rows,
            room=self.workspace.room_for_cache,
            is_fp8=is_fp8,
        )


def _read_layer(layer: Any, precision: str) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    return _Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=build_linear(parts, precision=precision),
        norms=norms,
        output=build_linear([attention.o_proj], precision=precision),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=build_linear([mlp.gate_proj, mlp.up_proj], precision=precision),
        down=build_linear([mlp.down_proj], precision=precision),
    )
