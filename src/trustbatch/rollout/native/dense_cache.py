"""The KV cache on a CPU: blocks of prompts with the rows that continue them."""

import torch
from torch import Tensor

from trustbatch.rollout.native.cache import HeadNorms, Heads
from trustbatch.rollout.native.linear import round_rows
from trustbatch.rollout.native.operations import rotate, split_heads
from trustbatch.rollout.native.prompt_block import PromptBlock


class DenseCache:
    """The cache of all running rows; each addition of prompts is a block of its own.

    With `is_fp8` keys and values are rounded to e4m3 before they are stored, in their own dtype.
    """

    address = 0
    """there are no CUDA graphs on a CPU"""
    shares_pages = False
    """there are no pages"""

    def __init__(
        self, heads: Heads, num_layers: int, dtype: torch.dtype, *, is_fp8: bool = False
    ) -> None:
        self.heads = heads
        self.is_fp8 = is_fp8
        self.num_layers = num_layers
        self.dtype = dtype
        self.blocks: list[PromptBlock] = []

    def clear(self) -> None:
        """Drop all rows and free their memory."""
        self.blocks = []

    def add_prompts(self, lengths: list[int], copies: list[int]) -> None:
        """Reserve memory for prompts, padded on the right, and for copies[p] rows of prompt p."""
        block = PromptBlock(lengths, copies, self.heads, self.num_layers, self.dtype)
        self.blocks.append(block)

    def store_prompts(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values [P, KV heads, L, D] of the prompts added last."""
        del layer  # they come in order
        if self.is_fp8:
            keys, values = round_rows(keys), round_rows(values)
        self.blocks[-1].store_prompts(keys, values)
        return keys, values

    def drop_prompts(self) -> None:
        """Give up the prompts added last."""
        self.blocks.pop()

    def finish_prompts(self) -> None:
        """Do nothing: the rows exist already."""

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this (ascending) order."""
        start = 0
        remaining = []
        for block in self.blocks:
            stop = start + block.num_rows
            block_index = [row - start for row in index if start <= row < stop]
            if block_index:
                block.keep(block_index)
                remaining.append(block)
            start = stop
        self.blocks = remaining

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max((block.longest for block in self.blocks), default=0)

    def reserve(self, num_steps: int, most_steps: int) -> None:
        """Reserve memory for `num_steps` more tokens in every row; a block grows by itself."""
        for block in self.blocks:
            block.reserve(num_steps)

    def advance(self, num_steps: int) -> None:
        """Advance all rows by `num_steps` tokens."""
        for block in self.blocks:
            block.num_sampled += num_steps

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: tuple[Tensor, Tensor],
        position: Tensor,
    ) -> Tensor:
        """Store one key and value per row, from [n, (H + 2 KV) D]; return attention [n, H D]."""
        if layer == 0:
            self._place_rotary(rotary, position)
        rows = rotate(split_heads(qkv, self.heads, norms), *self.step_rotary, self.dtype)
        if self.is_fp8:
            rows[:, self.heads.num_query :] = round_rows(rows[:, self.heads.num_query :])
        if len(self.blocks) == 1:
            return self.blocks[0].attend(layer, rows)
        sizes = [block.num_rows for block in self.blocks]
        parts = zip(self.blocks, rows.split(sizes), strict=True)
        return torch.cat([block.attend(layer, part) for block, part in parts])

    def _place_rotary(self, rotary: tuple[Tensor, Tensor], position: Tensor) -> None:
        """Look up the rotary embeddings [n, H + 2 KV, D] of a step, once for all layers.

        They include the scale of the queries, so that scores need none; values are not rotated.
        """
        num_query, num_kv = self.heads.num_query, self.heads.num_kv
        cosines, sines = (
            part[position][:, None].repeat(1, num_query + 2 * num_kv, 1) for part in rotary
        )
        cosines[:, -num_kv:], sines[:, -num_kv:] = 1.0, 0.0
        for part in (cosines, sines):
            part[:, :num_query] *= self.heads.dim**-0.5
        self.step_rotary = cosines, sines
