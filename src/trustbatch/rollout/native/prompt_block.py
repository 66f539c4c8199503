"""Keys and values of some prompts, stored once for all their samples, and of the samples' tokens.

Attention reads a prompt's keys once for the whole group, in one matrix product, and computes one
softmax over the scores of prompt and sampled tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from trustbatch.rollout.native.cache import Heads

SMALLEST_CAPACITY = 32
"""sampled tokens per row that the first allocation holds"""


class PromptBlock:
    """Prompts of one prefill, and the rows that continue them.

    Rows of one prompt are adjacent, and all rows of the block have sampled the same number of
    tokens.

    KV heads come before rows in every tensor. So [KV, n, ...] of the rows is, without a copy, also
    [KV P, M, ...] of the prompts, where each of the P prompts has M rows; where some have fewer,
    the rows are copied into P M cells.
    """

    def __init__(
        self,
        lengths: list[int],
        copies: list[int],
        heads: Heads,
        num_layers: int,
        dtype: torch.dtype,
    ) -> None:
        self.heads = heads
        self.dtype = dtype
        self.lengths = lengths
        self.prompt_of_row = [p for p, count in enumerate(copies) for _ in range(count)]
        self.num_sampled = 0
        self.prompts: list[Tensor] = []
        """each layer's [2, KV heads, P, L, D], keys and values"""
        own_shape = (2, SMALLEST_CAPACITY, heads.num_kv, self.num_rows, heads.dim)
        self.own = [torch.empty(own_shape, dtype=dtype) for _ in range(num_layers)]
        """each layer's [2, capacity, KV heads, n, D]; tokens outermost, so that reads are
        contiguous: with free capacity between the rows, products take twice as long"""
        self._arrange()

    @property
    def num_rows(self) -> int:
        """Rows that still run."""
        return len(self.prompt_of_row)

    @property
    def longest(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths) + self.num_sampled

    def store_prompts(self, keys: Tensor, values: Tensor) -> None:
        """Store the next layer's keys and values [P, KV heads, L, D]."""
        self.prompts.append(torch.stack([keys.transpose(0, 1), values.transpose(0, 1)]))

    def reserve(self, num_steps: int) -> None:
        """Reserve memory for `num_steps` more tokens in every row."""
        capacity = self.own[0].shape[1]
        missing = self.num_sampled + num_steps - capacity
        if missing > 0:
            room = (0, 0, 0, 0, 0, 0, 0, max(capacity, missing))
            self.own = [functional.pad(part, room) for part in self.own]

    def keep(self, index: list[int]) -> None:
        """Keep some of the rows, and the prompts that still have one."""
        kept = [self.prompt_of_row[row] for row in index]
        prompts = sorted(set(kept))
        if len(prompts) < len(self.lengths):
            self.lengths = [self.lengths[prompt] for prompt in prompts]
            self.prompts = [part[:, :, prompts] for part in self.prompts]
        if len(index) < self.num_rows:
            self.own = [part[:, :, :, index] for part in self.own]
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        self.prompt_of_row = [number_of[prompt] for prompt in kept]
        self._arrange()

    def attend(self, layer: int, rows: Tensor) -> Tensor:
        """Store the key and value of each row's new token; return attention [n, H D].

        rows: [n, H + 2 KV, D], query, key and value heads, where queries are scaled.
        """
        num_query, num_kv, dim = self.heads.num_query, self.heads.num_kv, self.heads.dim
        group = num_query // num_kv
        own = self.own[layer]
        new = rows[:, num_query:].view(-1, 2, num_kv, dim)
        own[:, self.num_sampled] = new.permute(1, 2, 0, 3)
        own_keys, own_values = own[:, : self.num_sampled + 1].flatten(2, 3).transpose(1, 2)
        keys, values = self.prompts[layer].flatten(1, 2)
        length = keys.shape[1]

        query = rows[:, :num_query].view(-1, num_kv, group, dim).transpose(0, 1).contiguous()
        of_own = torch.bmm(query.view(-1, group, dim), own_keys.mT)
        cells = self._to_cells(query)
        if self.mask is None:
            of_prompt = torch.bmm(cells, keys.mT)
        else:
            of_prompt = torch.baddbmm(self.mask, cells, keys.mT)
        scores = torch.cat([self._to_rows(of_prompt, group).flatten(0, 1), of_own], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
        on_prompt = weights[..., :length].view(num_kv, -1, group, length)
        out = self._to_rows(torch.bmm(self._to_cells(on_prompt), values), group)
        out = torch.baddbmm(out.flatten(0, 1), weights[..., length:], own_values)
        return out.view(num_kv, -1, group, dim).transpose(0, 1).reshape(-1, num_query * dim)

    def _to_cells(self, rows: Tensor) -> Tensor:
        """Turn [KV, n, G, x] of the rows into [KV P, M G, x] of the prompts."""
        if self.row_of_cell is not None:
            rows = rows[:, self.row_of_cell]
        num_prompts = len(self.lengths)
        return rows.reshape(len(rows) * num_prompts, -1, rows.shape[-1])

    def _to_rows(self, cells: Tensor, group: int) -> Tensor:
        """Undo `_to_cells`."""
        rows = cells.view(self.heads.num_kv, -1, group, cells.shape[-1])
        return rows if self.row_of_cell is None else rows[:, self.cell_of_row]

    def _arrange(self) -> None:
        """Find each row's cell among P M, where M is the size of the largest group."""
        counts = [0] * len(self.lengths)
        numbers = []
        for prompt in self.prompt_of_row:
            numbers.append(counts[prompt])
            counts[prompt] += 1
        width = max(counts)
        self.row_of_cell: Tensor | None = None
        if min(counts) < width:
            cells = [p * width + m for p, m in zip(self.prompt_of_row, numbers, strict=True)]
            self.cell_of_row = torch.tensor(cells)
            # cells without a row repeat the first row; their results are not read
            self.row_of_cell = torch.zeros(len(counts) * width, dtype=torch.long)
            self.row_of_cell[self.cell_of_row] = torch.arange(len(cells))
        self.mask = self._mask_of_padding()

    def _mask_of_padding(self) -> Tensor | None:
        """Return [KV P, 1, L], -inf where a prompt has no token; None where all are as long."""
        longest = self.prompts[0].shape[3] if self.prompts else max(self.lengths)
        if min(self.lengths) == longest:
            return None
        has_token = torch.arange(longest) < torch.tensor(self.lengths)[:, None]
        mask = torch.zeros(has_token.shape, dtype=self.dtype).masked_fill_(~has_token, -torch.inf)
        return mask.repeat(self.heads.num_kv, 1)[:, None]
