"""Units: what stays together when sequences are divided over micro-batches and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trustbatch.models.packing.layout import Segment
from trustbatch.types import TrainSequence

WORTH_SHARING = 0.9
"""a prompt is shared if that leaves at most this part of its group's tokens to compute"""
LONGEST_SHARED = 1024
"""longer sequences stay alone: a shared prompt needs an explicit [response, sequence] mask"""
ATTENTION_CATCHES_UP = 16384
"""tokens of a sequence whose attention costs as much as all else: about 12 times the hidden size"""


@dataclass(frozen=True)
class SharedPromptGroup:
    """One sequence, or several that share their prompt; a response's last token is no input."""

    sequences: tuple[TrainSequence, ...]

    @cached_property
    def shape(self) -> Segment:
        """Its input tokens, as the attention sees them."""
        prompt = len(self.sequences[0].prompt_token_ids)
        responses = [len(each.completion.token_ids) - 1 for each in self.sequences]
        return (
            Segment(prompt, tuple(responses))
            if len(responses) > 1
            else Segment(prompt + responses[0])
        )

    @cached_property
    def num_tokens(self) -> int:
        """How many tokens have to be computed."""
        return self.shape.num_tokens

    @cached_property
    def cost(self) -> float:
        """Time to compute it, in that of a token without attention.

        A token costs 1, and attention as much again where a sequence has ATTENTION_CATCHES_UP
        tokens: n + n^2 / ATTENTION_CATCHES_UP for one sequence of n.
        """
        shape = self.shape
        seen = shape.prompt**2 + sum(r * (2 * shape.prompt + r) for r in shape.responses)
        return shape.num_tokens + seen / ATTENTION_CATCHES_UP


def units_of(
    sequences: Sequence[TrainSequence], *, may_share_prompts: bool, max_tokens: int
) -> list[SharedPromptGroup]:
    """Form units of at most `max_tokens`, longest first; a sequence is never cut."""
    by_prompt: dict[tuple[int, ...], list[TrainSequence]] = {}
    for number, sequence in enumerate(sequences):
        key = sequence.prompt_token_ids if may_share_prompts else (number,)
        by_prompt.setdefault(key, []).append(sequence)
    units = [
        SharedPromptGroup(tuple(part))
        for group in by_prompt.values()
        for part in (_cut(group, max_tokens) if _sharing_pays(group) else [[s] for s in group])
    ]
    # sorted() is stable, so equal units keep their order and the result is reproducible
    return sorted(units, key=lambda unit: -unit.num_tokens)


def _sharing_pays(group: Sequence[TrainSequence]) -> bool:
    if max(sequence.num_tokens for sequence in group) > LONGEST_SHARED:
        return False
    alone = sum(sequence.num_tokens for sequence in group)
    saved = (len(group) - 1) * len(group[0].prompt_token_ids)
    return alone - saved <= WORTH_SHARING * alone


def _cut(group: Sequence[TrainSequence], max_tokens: int) -> list[list[TrainSequence]]:
    """Divide the samples of a prompt into parts that keep to the budget."""
    parts: list[list[TrainSequence]] = []
    used = 0
    for sequence in group:
        own = len(sequence.completion.token_ids) - 1
        if parts and used + own <= max_tokens:
            parts[-1].append(sequence)
            used += own
        else:
            parts.append([sequence])
            used = len(sequence.prompt_token_ids) + own
    return parts
