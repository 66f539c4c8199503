"""Tokens sampled for an examination, in a fixed order."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trustbatch.models.policy import Policy
from trustbatch.rollout.collect import collect
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import Completion, Prompt, Provenance, SamplingParams, TrainSequence

SAMPLES_PER_PROMPT = 4
LONGEST = 64
"""tokens of a completion: enough for a KV cache to go wrong, few enough for many prompts"""
FEWEST_COMPLETIONS = 32
MAX_PROMPTS = 64
"""in one round"""
MAX_ROUNDS = 16


@dataclass(frozen=True)
class ExaminedTokens:
    """Completions, and their T tokens laid end to end in the order of the completions."""

    sequences: list[TrainSequence]
    recorded: Tensor
    """[T] float64, the log-probs that came with the tokens"""
    provenance: Provenance

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.recorded)

    def of_anchor(self) -> "ExaminedTokens":
        """Return the same tokens with the anchor's log-probs, as training would take them."""
        sequences = [
            replace(sequence, completion=_of_anchor(sequence.completion))
            for sequence in self.sequences
        ]
        recorded = [sequence.completion.behavior_logp.double() for sequence in sequences]
        return ExaminedTokens(sequences, torch.cat(recorded), self.provenance)


def _of_anchor(completion: Completion) -> Completion:
    """Put the anchor's log-probs in the place of those sampled from, unless there are none."""
    logp, top_logp = completion.anchor_logp, completion.anchor_top_logp
    return replace(
        completion,
        behavior_logp=completion.behavior_logp if logp is None else logp,
        behavior_top_logp=completion.behavior_top_logp if top_logp is None else top_logp,
        anchor_logp=None,
        anchor_top_logp=None,
    )


def sample_tokens(
    engine: RolloutEngine,
    policy: Policy,
    prompt_at: Callable[[int], Prompt],
    sampling: SamplingParams,
    *,
    num_tokens: int,
    label: str,
) -> ExaminedTokens:
    """Sample completions of the task's first prompts until there are `num_tokens` tokens.

    `label` is part of the prompts' ids, on which random numbers depend: two labels sample
    independently of each other.
    """
    longest = min(sampling.max_tokens, LONGEST, max(num_tokens // FEWEST_COMPLETIONS, 1))
    sampling = replace(sampling, max_tokens=longest)
    num_prompts = min(math.ceil(num_tokens / (longest * SAMPLES_PER_PROMPT)), MAX_PROMPTS)
    sequences: list[TrainSequence] = []
    recorded: list[Tensor] = []
    for number in range(MAX_ROUNDS):
        first = number * num_prompts
        prompts = [prompt_at(first + place) for place in range(num_prompts)]
        named = [replace(prompt, id=f"doctor-{label}-{prompt.id}") for prompt in prompts]
        groups = collect(
            engine,
            policy,
            named,
            task=None,  # a first turn has all that is examined
            num_samples=SAMPLES_PER_PROMPT,
            sampling=sampling,
        )
        for group in groups:
            for completion in group.completions:
                sequences.append(
                    TrainSequence(
                        prompt_token_ids=group.prompt_token_ids,
                        completion=completion,
                        advantage=0.0,
                    )
                )
                recorded.append(completion.behavior_logp.double())
        if sum(map(len, recorded)) >= num_tokens:
            break
    return ExaminedTokens(sequences, torch.cat(recorded), sequences[0].completion.provenance)
