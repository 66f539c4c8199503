"""From scored groups to sequences, and from sequences to the parts of one optimizer step each."""

import math
import random
from collections.abc import Sequence

from torch import Tensor

from trustbatch.types import RolloutGroup, TrainSequence


def to_sequences(groups: Sequence[RolloutGroup], advantages: Tensor) -> list[TrainSequence]:
    """Give each completion its advantage [groups, samples]; one that has none is left out."""
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
    """Divide sequences at random into `count` parts of nearly equal size, none of them empty."""
    order = list(range(len(sequences)))
    if count > 1:
        random.Random(seed).shuffle(order)
    parts = [[sequences[i] for i in order[start::count]] for start in range(count)]
    return [part for part in parts if part]
