"""From sequences to padded batches that one forward pass can hold.

A batch has one of two layouts. Plain: every row is a prompt and its response. Shared: the prompt of
a group is computed once and its rows hold the responses alone, which saves most of the work where
prompts are long beside responses. Both give the same log-probs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from trustbatch.padding import pad_left
from trustbatch.types import TrainSequence

WORTH_SHARING = 0.9
"""prompts are shared if that leaves at most this part of the tokens to compute"""
LONGEST_SHARED = 1024
"""longer sequences stay plain: a shared prompt needs an explicit [response, sequence] mask"""


@dataclass(frozen=True, kw_only=True)
class SharedPrompts:
    """P left-padded prompts, each the beginning of several rows."""

    input_ids: Tensor
    """[P, Lp]"""
    mask: Tensor
    """[P, Lp] 1 for tokens, 0 for padding"""
    of_row: Tensor
    """[B] which prompt each row continues"""

    def to(self, device: torch.device) -> "SharedPrompts":
        """Move every tensor."""
        return SharedPrompts(
            input_ids=self.input_ids.to(device),
            mask=self.mask.to(device),
            of_row=self.of_row.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B right-padded rows, and where the logits that predict their T response tokens are.

    The last token of a response predicts nothing and is no input. Example: prompt [5, 6] with
    response [7, 8] is the plain row [5, 6, 7], whose columns 1 and 2 predict 7 and 8. With a shared
    prompt [5, 6] the row is [7]; column 0 is then the prompt's last position, and column 1 the 7.
    """

    input_ids: Tensor
    """[B, L]"""
    prompts: SharedPrompts | None
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
    policies: tuple[str, ...]
    """[B] who drew each row"""

    def to(self, device: torch.device) -> "MicroBatch":
        """Move every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            n: v.to(device) for n, v in values.items() if isinstance(v, Tensor | SharedPrompts)
        }
        return replace(self, **moved)


def micro_batches(
    sequences: Sequence[TrainSequence],
    *,
    max_tokens: int,
    pad_token_id: int,
    may_share_prompts: bool = False,
) -> list[MicroBatch]:
    """Pack sequences of similar length together, at most `max_tokens` with padding in each batch.

    A sequence that is longer than that gets a batch of its own.
    """
    if may_share_prompts and _sharing_pays(sequences):
        by_prompt: dict[tuple[int, ...], list[TrainSequence]] = {}
        for sequence in sequences:
            by_prompt.setdefault(sequence.prompt_token_ids, []).append(sequence)
        units = [
            group[start : start + _rows_that_fit(group, max_tokens)]
            for group in by_prompt.values()
            for start in range(0, len(group), _rows_that_fit(group, max_tokens))
        ]
        shared = True
    else:
        units, shared = [[sequence] for sequence in sequences], False
    # sorted() is stable, so equal lengths keep their order and the result is reproducible
    units.sort(key=lambda unit: -max(sequence.num_tokens for sequence in unit))
    batches: list[list[TrainSequence]] = []
    width = 0
    for unit in units:
        # the first unit of a batch has its longest sequence and sets the width
        if batches and (len(batches[-1]) + len(unit)) * width <= max_tokens:
            batches[-1] += unit
        else:
            batches.append(list(unit))
            width = max(sequence.num_tokens for sequence in unit)
    return [_lay_out(batch, pad_token_id, shared=shared) for batch in batches]


def _rows_that_fit(group: Sequence[TrainSequence], max_tokens: int) -> int:
    return max(max_tokens // max(sequence.num_tokens for sequence in group), 1)


def _sharing_pays(sequences: Sequence[TrainSequence]) -> bool:
    if max(sequence.num_tokens for sequence in sequences) > LONGEST_SHARED:
        return False
    plain = sum(sequence.num_tokens for sequence in sequences)
    repeated = sum(len(sequence.prompt_token_ids) for sequence in sequences)
    distinct = sum(map(len, {sequence.prompt_token_ids for sequence in sequences}))
    return plain - repeated + distinct <= WORTH_SHARING * plain


def _lay_out(sequences: Sequence[TrainSequence], pad_token_id: int, *, shared: bool) -> MicroBatch:
    completions = [sequence.completion for sequence in sequences]
    responses = [completion.token_ids for completion in completions]
    prompts = [sequence.prompt_token_ids for sequence in sequences]
    if shared:
        rows = [response[:-1] for response in responses]
        first_columns = torch.zeros(len(sequences), dtype=torch.int64)
    else:
        rows = [
            torch.cat([torch.tensor(prompt), response[:-1]])
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        first_columns = torch.tensor([len(prompt) - 1 for prompt in prompts])
    lengths = torch.tensor([len(response) for response in responses])
    target = torch.cat(responses)
    # counts 0, 1, 2, ... within each response
    place = torch.arange(len(target)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    advantage = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float32)
    return MicroBatch(
        input_ids=torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=pad_token_id
        ),
        prompts=_share(prompts, pad_token_id) if shared else None,
        row=torch.arange(len(sequences)).repeat_interleave(lengths),
        column=first_columns.repeat_interleave(lengths) + place,
        target=target,
        behaviour_logp=torch.cat([completion.behaviour_logp for completion in completions]),
        advantage=advantage.repeat_interleave(lengths),
        top_token_ids=_cat([completion.top_token_ids for completion in completions]),
        behaviour_top_logp=_cat([completion.behaviour_top_logp for completion in completions]),
        policies=tuple(completion.provenance.policy for completion in completions),
    )


def _share(prompts: Sequence[tuple[int, ...]], pad_token_id: int) -> SharedPrompts:
    number_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    ids, mask = pad_left(list(number_of), pad_token_id)
    of_row = torch.tensor([number_of[prompt] for prompt in prompts])
    return SharedPrompts(input_ids=ids, mask=mask, of_row=of_row)


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if len(present) == len(tensors) else None
