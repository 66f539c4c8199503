"""Prompts packed into rows of one matrix: no padding, and shared prefixes only once.

Prompts of a task begin with the same tokens (the chat template, a system prompt, an instruction),
and a token's key, value and output depend only on the tokens up to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PackedPrompts(NamedTuple):
    """Distinct prefixes of P prompts, one per row, and their positions in the padded prompts."""

    token_ids: Tensor
    """[rows], the last token of each prefix"""
    row_of_token: Tensor
    """[P, L], the row of each token; the prompts are padded on the right with row 0"""
    token_of_row: Tensor
    """[rows], an index into [P L] of a token with this row"""
    last_rows: Tensor
    """[P], the rows of the complete prompts"""

    @property
    def longest(self) -> int:
        """Tokens in the longest prompt, L."""
        return self.row_of_token.shape[1]

    @property
    def position_of_row(self) -> Tensor:
        """[rows], the position of the last token of each prefix."""
        return self.token_of_row % self.longest


def pack_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> PackedPrompts:
    """Assign a row to every prefix of a prompt that no earlier prompt has."""
    longest = max(len(prompt) for prompt in prompts)
    row_of: dict[tuple[int, int], int] = {}
    token_ids, token_of_row, last_rows = [], [], []
    row_of_token = torch.zeros(len(prompts), longest, dtype=torch.long)
    for number, prompt in enumerate(prompts):
        row = -1
        rows = []
        for position, token_id in enumerate(prompt):
            prefix = (row, token_id)
            row = row_of.setdefault(prefix, len(row_of))
            if row == len(token_ids):
                token_ids.append(token_id)
                token_of_row.append(number * longest + position)
            rows.append(row)
        row_of_token[number, : len(rows)] = torch.tensor(rows)
        last_rows.append(row)
    return PackedPrompts(
        token_ids=torch.tensor(token_ids, device=device),
        row_of_token=row_of_token.to(device),
        token_of_row=torch.tensor(token_of_row, device=device),
        last_rows=torch.tensor(last_rows, device=device),
    )
