"""Prompts of unequal length side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return prompts as rows that end together [P, Lp], and a mask with 1 for their tokens."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=pad_token_id, padding_side="left"
    )
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    from_end = ids.shape[1] - torch.arange(ids.shape[1])
    return ids, (from_end[None, :] <= lengths[:, None]).long()


def pad_right(prompts: Sequence[Sequence[int]], pad_token_id: int) -> Tensor:
    """Return prompts as rows that begin together [P, L]."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)


def positions_of(mask: Tensor) -> Tensor:
    """Return the position of each token [B, L] of rows with padding; that of padding is 0."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
