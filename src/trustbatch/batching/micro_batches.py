"""From sequences to right-padded batches that one forward pass can hold."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trustbatch.types import TrainSequence


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B right-padded rows, and where their T response tokens are.

    Example: prompt [5, 6] with response [7, 8] is the row [5, 6, 7, 8]; token 7 is predicted at
    column 1 and token 8 at column 2.
    """

    input_ids: Tensor
    """[B, L]"""
    row: Tensor
    """[T] row of each response token, which is also its sequence"""
    column: Tensor
    """[T] column of the logits that predict it"""
    target: Tensor
    """[T] the token itself"""
    behaviour_logp: Tensor
    """[T]"""
    advantage: Tensor
    """[T]"""
    top_token_ids: Tensor | None
    """[T, K]"""
    behaviour_top_logp: Tensor | None
    """[T, K]"""

    def to(self, device: torch.device) -> "MicroBatch":
        """Move every tensor."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, **moved)


def micro_batches(
    sequences: Sequence[TrainSequence], *, max_tokens: int, pad_token_id: int
) -> list[MicroBatch]:
    """Pack sequences of similar length together, at most `max_tokens` with padding in each batch.

    A sequence that is longer than `max_tokens` gets a batch of its own.
    """
    # sorted() is stable, so equal lengths keep their order and the result is reproducible
    ordered = sorted(sequences, key=lambda sequence: -sequence.num_tokens)
    batches: list[list[TrainSequence]] = []
    for sequence in ordered:
        # the first sequence of a batch is its longest and sets the width
        if batches and (len(batches[-1]) + 1) * batches[-1][0].num_tokens <= max_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return [_pad(batch, pad_token_id) for batch in batches]


def _pad(sequences: Sequence[TrainSequence], pad_token_id: int) -> MicroBatch:
    completions = [sequence.completion for sequence in sequences]
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    prompt_lengths = torch.tensor([len(sequence.prompt_token_ids) for sequence in sequences])
    rows = torch.arange(len(sequences)).repeat_interleave(lengths)
    starts = (prompt_lengths - 1 - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    target = torch.cat([completion.token_ids for completion in completions])
    input_ids = torch.full(
        (len(sequences), max(sequence.num_tokens for sequence in sequences)), pad_token_id
    )
    for number, sequence in enumerate(sequences):
        prompt = torch.tensor(sequence.prompt_token_ids)
        input_ids[number, : len(prompt)] = prompt
        input_ids[number, len(prompt) : sequence.num_tokens] = sequence.completion.token_ids
    advantage = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32)
    return MicroBatch(
        input_ids=input_ids,
        row=rows,
        column=starts + torch.arange(len(target)),
        target=target,
        behaviour_logp=torch.cat([completion.behaviour_logp for completion in completions]),
        advantage=advantage.repeat_interleave(lengths),
        top_token_ids=_cat([completion.top_token_ids for completion in completions]),
        behaviour_top_logp=_cat([completion.behaviour_top_logp for completion in completions]),
    )


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < len(tensors):
        return None
    return torch.cat(present)
