"""From scored rollouts to train sequences, mini-batches, and groups that share their prompt."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from trustbatch.models.packing.layout import Segment
from trustbatch.types import RolloutGroup, TrainSequence

MAX_REMAINING_FRACTION = 0.9
"""a prompt is shared if at most this fraction of the group's tokens is left to compute; where
attention copies prompts, that takes a tenth of a small model's time"""
MAX_SHARED_LENGTH = 1024
"""longer sequences share no prompt, since sharing needs an explicit [response, sequence] mask, but
for copies"""
ATTENTION_PARITY_LENGTH = 16384
"""sequence length at which attention costs as much as all else: about 12 times the hidden size"""


def to_sequences(groups: Sequence[RolloutGroup], advantages: Tensor) -> list[TrainSequence]:
    """Give each completion its advantage [groups, samples]; leave out those without one (NaN)."""
    return [
        TrainSequence(
            prompt_token_ids=group.prompt_token_ids, completion=completion, advantage=advantage
        )
        for group, row in zip(groups, advantages.tolist(), strict=True)
        for completion, advantage in zip(group.completions, row, strict=True)
        if not math.isnan(advantage)
    ]


def mini_batches(
    sequences: Sequence[TrainSequence], count: int, *, seed: str
) -> list[list[TrainSequence]]:
    """Split sequences at random into `count` mini-batches of nearly equal size, none of them empty.

    Each mini-batch is one optimizer step.
    """
    order = list(range(len(sequences)))
    if count > 1:
        random.Random(seed).shuffle(order)
    parts = [[sequences[i] for i in order[start::count]] for start in range(count)]
    return [part for part in parts if part]


@dataclass(frozen=True)
class SharedPromptGroup:
    """Sequences that are computed together: one, or several that share the tokens of their prompt.

    The last token of a response predicts nothing, so it is no input.
    """

    sequences: tuple[TrainSequence, ...]
    indices: tuple[int, ...]
    """of the sequences, in the list from which the groups were made"""

    @cached_property
    def segment(self) -> Segment:
        """Its input tokens in a packed batch."""
        prompt = len(self.sequences[0].prompt_token_ids)
        responses = [len(each.completion.token_ids) - 1 for each in self.sequences]
        return (
            Segment(prompt, tuple(responses))
            if len(responses) > 1
            else Segment(prompt + responses[0])
        )

    @cached_property
    def num_tokens(self) -> int:
        """How many input tokens have to be computed."""
        return self.segment.num_tokens

    @cached_property
    def cost(self) -> float:
        """Time to compute the group, in units of one token without attention.

        One sequence of n tokens costs n + n^2 / ATTENTION_PARITY_LENGTH.
        """
        segment = self.segment
        attended = segment.prompt**2 + sum(r * (2 * segment.prompt + r) for r in segment.responses)
        return segment.num_tokens + attended / ATTENTION_PARITY_LENGTH


def group_by_prompt(
    sequences: Sequence[TrainSequence],
    *,
    may_share_prompts: bool,
    copies_prompts: bool = False,
    max_tokens: int,
) -> list[SharedPromptGroup]:
    """Form groups of at most `max_tokens`, longest first; a sequence is never split."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        key = sequence.prompt_token_ids if may_share_prompts else (index,)
        by_prompt.setdefault(key, []).append(index)
    groups = []
    for indices in by_prompt.values():
        samples = [sequences[index] for index in indices]
        pays = sharing_pays(
            prompt=len(samples[0].prompt_token_ids),
            lengths=[sequence.num_tokens for sequence in samples],
            copies_prompts=copies_prompts,
        )
        sizes = _split_sizes(samples, max_tokens) if pays else [1] * len(samples)
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            groups.append(SharedPromptGroup(tuple(samples[part]), tuple(indices[part])))
            start += size
    # sorted() is stable, so groups of equal length keep their order and the result is reproducible
    return sorted(groups, key=lambda group: -group.num_tokens)


def sharing_pays(*, prompt: int, lengths: Sequence[int], copies_prompts: bool) -> bool:
    """Return whether samples of these lengths share a prompt of `prompt` tokens."""
    if max(lengths) > MAX_SHARED_LENGTH and not copies_prompts:
        return False
    alone = sum(lengths)
    saved = (len(lengths) - 1) * prompt
    return alone - saved <= MAX_REMAINING_FRACTION * alone


def _split_sizes(samples: Sequence[TrainSequence], max_tokens: int) -> list[int]:
    """Split the samples of a prompt into parts within the token budget; returns their sizes."""
    sizes: list[int] = []
    used = 0
    for sequence in samples:
        own = len(sequence.completion.token_ids) - 1
        if sizes and used + own <= max_tokens:
            sizes[-1] += 1
            used += own
        else:
            sizes.append(1)
            used = len(sequence.prompt_token_ids) + own
    return sizes
