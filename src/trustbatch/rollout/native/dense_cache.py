"""Keys and values on a CPU: a prompt's are kept once for all its samples, each sample's own apart.

Attention reads a prompt's keys once for the whole group, as one matrix product, and takes one
softmax over the scores of both parts.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.rollout.native.cache import HeadNorms, Heads
from trustbatch.rollout.native.operations import split_and_rotate

SMALLEST_CAPACITY = 32


@dataclass
class _PromptBlock:
    """Prompts that were computed together, and the rows that continue them, which are adjacent."""

    lengths: list[int]
    mask: Tensor | None
    """[P, 1, 1, L], -inf where there is no token; None where all prompts have the same length"""
    prompt_of_row: list[int]
    keys: list[Tensor] = field(default_factory=list)
    """each layer's [P, KV heads, L, D]"""
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrange()

    def arrange(self) -> None:
        """Lay the rows out as [P, M] for the product with their prompts; M is the largest group."""
        counts = [0] * len(self.lengths)
        for prompt in self.prompt_of_row:
            counts[prompt] += 1
        self.width = max(counts)
        self.is_even = min(counts) == self.width
        rows = torch.zeros(len(counts), self.width, dtype=torch.long)
        cells, seen = [], [0] * len(counts)
        for row, prompt in enumerate(self.prompt_of_row):
            rows[prompt, seen[prompt]] = row
            cells.append(prompt * self.width + seen[prompt])
            seen[prompt] += 1
        self.row_of_cell = rows.flatten()
        self.cell_of_row = torch.tensor(cells)

    def keep(self, index: list[int]) -> None:
        """Keep some of the rows, and the prompts that still have one."""
        kept = [self.prompt_of_row[row] for row in index]
        prompts = sorted(set(kept))
        if len(prompts) < len(self.lengths):
            self.lengths = [self.lengths[prompt] for prompt in prompts]
            self.keys = [part[prompts] for part in self.keys]
            self.values = [part[prompts] for part in self.values]
            self.mask = None if self.mask is None else self.mask[prompts]
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        self.prompt_of_row = [number_of[prompt] for prompt in kept]
        self.arrange()

    def gather(self, rows: Tensor) -> Tensor:
        """Turn [n, KV heads, G, x] of the rows into [P, KV heads, M G, x] of the prompts."""
        if not self.is_even:
            rows = rows[self.row_of_cell]
        grouped = rows.view(-1, self.width, *rows.shape[1:]).transpose(1, 2)
        return grouped.reshape(*grouped.shape[:2], -1, rows.shape[-1])

    def scatter(self, cells: Tensor, group: int) -> Tensor:
        """Undo `gather`."""
        num_prompts, num_kv = cells.shape[:2]
        rows = cells.view(num_prompts, num_kv, self.width, group, -1).transpose(1, 2).flatten(0, 1)
        return rows if self.is_even else rows[self.cell_of_row]


class DenseCache:
    """The cache of all running rows; grows by need, along rows and along tokens."""

    address = 0
    """no graph is recorded on a CPU"""

    def __init__(self, heads: Heads, num_layers: int, dtype: torch.dtype) -> None:
        self.heads = heads
        self.num_layers = num_layers
        self.dtype = dtype
        self.blocks: list[_PromptBlock] = []
        self.num_drawn: list[int] = []
        empty = torch.empty(0, heads.num_kv, SMALLEST_CAPACITY, heads.dim, dtype=dtype)
        self.keys = [empty] * num_layers
        self.values = [empty] * num_layers
        self._prepare_step()

    def add_prompts(self, lengths: list[int], copies: list[int]) -> None:
        """Make room for prompts, padded on the right, and for so many rows that continue each."""
        longest = max(lengths)
        mask = None
        if min(lengths) < longest:
            has_token = torch.arange(longest) < torch.tensor(lengths)[:, None]
            mask = _additive(has_token[:, None, None], self.dtype)
        prompt_of_row = [p for p, count in enumerate(copies) for _ in range(count)]
        self.blocks.append(_PromptBlock(lengths, mask, prompt_of_row))
        self.num_drawn += [0] * len(prompt_of_row)
        num_new = len(prompt_of_row)
        for parts in (self.keys, self.values):
            for layer, part in enumerate(parts):
                # zeros: what lies in memory may be NaN, which a weight of 0 does not remove
                parts[layer] = torch.cat([part, part.new_zeros(num_new, *part.shape[1:])])
        self._prepare_step()

    def store_prompts(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep one layer's keys and values [P, KV heads, L, D] of the prompts added last."""
        del layer  # they come in order
        self.blocks[-1].keys.append(keys.contiguous())
        self.blocks[-1].values.append(values.contiguous())

    def finish_prompts(self) -> None:
        """Rows were there from the start."""

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this (ascending) order."""
        start = 0
        for block in self.blocks:
            stop = start + len(block.prompt_of_row)
            block_index = [row - start for row in index if start <= row < stop]
            if len(block_index) < stop - start and block_index:
                block.keep(block_index)
            elif not block_index:
                block.prompt_of_row = []
            start = stop
        self.blocks = [block for block in self.blocks if block.prompt_of_row]
        self.num_drawn = [self.num_drawn[row] for row in index]
        rows = torch.tensor(index, dtype=torch.long)
        for parts in (self.keys, self.values):
            parts[:] = [part[rows] for part in parts]
        self._prepare_step()

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        longest_prompt = max((max(block.lengths) for block in self.blocks), default=0)
        return longest_prompt + max(self.num_drawn, default=0)

    def reserve(self, num_steps: int) -> None:
        """Make room for so many more tokens in every row."""
        capacity = self.keys[0].shape[2]
        missing = max(self.num_drawn, default=0) + num_steps - capacity
        if missing <= 0:
            return
        room = (0, 0, 0, max(capacity, missing))
        for parts in (self.keys, self.values):
            parts[:] = [functional.pad(part, room) for part in parts]

    def advance(self, num_steps: int) -> None:
        """Take note that every row has so many tokens more."""
        self.num_drawn = [count + num_steps for count in self.num_drawn]
        self._prepare_step()

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotary: tuple[Tensor, Tensor],
        position: Tensor,
    ) -> Tensor:
        """Store one key and value a row, from [n, (H + 2 KV) D]; return attention [n, H D]."""
        if layer == 0:
            self._place_rotary(rotary, position)
        query, key, value = split_and_rotate(qkv, self.step_rotary, self.heads, norms)
        keys, values = self.keys[layer], self.values[layer]
        if self.all_at is not None:
            keys[:, :, self.all_at] = key
            values[:, :, self.all_at] = value
        else:
            keys[self.row_index, :, self.place] = key
            values[self.row_index, :, self.place] = value
        num_kv, dim = self.heads.num_kv, self.heads.dim
        group = self.heads.num_query // num_kv
        query = query.reshape(len(qkv), num_kv, group, dim)
        keys, values = keys[:, :, : self.num_places], values[:, :, : self.num_places]
        out = torch.empty_like(query)
        start = 0
        for block in self.blocks:
            stop = start + len(block.prompt_of_row)
            own = query[start:stop] @ keys[start:stop].transpose(-1, -2)
            if self.own_mask is not None:
                own += self.own_mask[start:stop]
            shared = block.gather(query[start:stop]) @ block.keys[layer].transpose(-1, -2)
            if block.mask is not None:
                shared += block.mask
            length = shared.shape[-1]
            scores = torch.cat([block.scatter(shared, group), own], dim=-1)
            weights = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
            from_prompt = block.gather(weights[..., :length]) @ block.values[layer]
            torch.matmul(weights[..., length:], values[start:stop], out=out[start:stop])
            out[start:stop] += block.scatter(from_prompt, group)
            start = stop
        return out.flatten(1)

    def _place_rotary(self, rotary: tuple[Tensor, Tensor], position: Tensor) -> None:
        """Look up the rotary embeddings of a step, once for all layers.

        Query heads are scaled with them, so that scores need no scaling.
        """
        scale = torch.ones(self.heads.num_query + self.heads.num_kv, 1)
        scale[: self.heads.num_query] = self.heads.dim**-0.5
        self.step_rotary = (
            rotary[0][position][:, None] * scale,
            rotary[1][position][:, None] * scale,
        )

    def _prepare_step(self) -> None:
        """Note where the next token of each row goes, and which places hold no token yet."""
        counts = self.num_drawn
        self.num_places = max(counts, default=0) + 1
        self.all_at = counts[0] if counts and min(counts) == max(counts) else None
        self.own_mask = None
        if self.all_at is None and counts:
            self.place = torch.tensor(counts)
            self.row_index = torch.arange(len(counts))
            has_token = torch.arange(self.num_places) <= self.place[:, None]
            self.own_mask = _additive(has_token[:, None, None], self.dtype)


def _additive(has_token: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where there is a token and -inf elsewhere, to be added to scores."""
    return torch.zeros(has_token.shape, dtype=dtype).masked_fill_(~has_token, -torch.inf)
