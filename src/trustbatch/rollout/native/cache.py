"""The interface of a KV cache."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

PAGE = 64
"""tokens in a page of the paged cache, and in a step of its attention kernel"""
GROWTH = 1.5
"""factor by which the pool of pages grows"""


class CacheFullError(Exception):
    """The device has no memory left for more keys and values."""


@dataclass(frozen=True)
class Heads:
    """The attention of a model: G = num_query / num_kv query heads read each KV head."""

    num_query: int
    num_kv: int
    dim: int
    epsilon: float
    """of the model's norms"""


class HeadNorms(NamedTuple):
    """Weights [D] of the norms that some models have on queries and keys."""

    query: Tensor
    key: Tensor


class LayerPages(NamedTuple):
    """Keys and values [pages, KV heads, PAGE, D] of one layer; FP8 ones are bytes with scales."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    """[pages, KV heads, PAGE] float32"""
    value_scales: Tensor | None

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values are e4m3."""
        return self.key_scales is not None


class Cache(Protocol):
    """Keys and values of all running rows, in every layer."""

    @property
    def address(self) -> int:
        """Changes whenever a tensor that a CUDA graph reads has moved."""
        ...

    @property
    def shares_pages(self) -> bool:
        """Whether attention reads some pages for several rows at once, with kernels of its own."""
        ...

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        ...

    def clear(self) -> None:
        """Drop all rows and free their memory."""
        ...

    def add_prompts(self, lengths: list[int], copies: list[int]) -> None:
        """Reserve memory for prompts, padded on the right, and for copies[p] rows of prompt p."""
        ...

    def store_prompts(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values [P, KV heads, L, D] of the prompts added last.

        Return what later tokens read, so that a prompt's own tokens can read the same.
        """
        ...

    def drop_prompts(self) -> None:
        """Give up the prompts added last, in place of `finish_prompts`."""
        ...

    def finish_prompts(self) -> None:
        """Turn the prompts added last, stored in all layers, into running rows."""
        ...

    def reserve(self, num_steps: int, most_steps: int) -> None:
        """Reserve memory for `num_steps` more tokens in every row; it gets at most `most_steps`."""
        ...

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: tuple[Tensor, Tensor],
        position: Tensor,
    ) -> Tensor:
        """Store one key and value per row, from [n, (H + 2 KV) D]; return attention [n, H D].

        rotary: cosines and sines [positions, D]; position [n]: that of each row's token.
        """
        ...

    def advance(self, num_steps: int) -> None:
        """Advance all rows by `num_steps` tokens."""
        ...

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this (ascending) order."""
        ...
