"""The tokens of some prompts as rows of one matrix: no padding, and what they share only once.

Prompts of a task begin with the same words (the chat template, a system prompt, an instruction),
and a token's key, value and output depend on nothing but the tokens up to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PackedPrompts(NamedTuple):
    """Distinct beginnings of P prompts, each a row, and where they stand in the padded prompts."""

    token_ids: Tensor
    """[rows], the last token of each beginning"""
    row_of_token: Tensor
    """[P, L] of the prompts padded on the right, where padding repeats the first row"""
    token_of_row: Tensor
    """[rows], one place in [P L] where the row is found"""
    last_rows: Tensor
    """[P], the whole prompts' rows"""

    @property
    def longest(self) -> int:
        """Tokens in the longest prompt, L."""
        return self.row_of_token.shape[1]

    @property
    def position_of_row(self) -> Tensor:
        """[rows], how many tokens come before the last of each beginning."""
        return self.token_of_row % self.longest


def pack_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> PackedPrompts:
    """Give a row to every beginning of a prompt that no earlier prompt has."""
    longest = max(len(prompt) for prompt in prompts)
    row_of: dict[tuple[int, int], int] = {}
    token_ids, token_of_row, last_rows = [], [], []
    row_of_token = torch.zeros(len(prompts), longest, dtype=torch.long)
    for number, prompt in enumerate(prompts):
        row = -1
        rows = []
        for position, token_id in enumerate(prompt):
            beginning = (row, token_id)
            row = row_of.setdefault(beginning, len(row_of))
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
