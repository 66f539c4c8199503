"""Tokens generated for an examination, with the log-probs that were recorded for them."""

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
MAX_COMPLETION_TOKENS = 64
"""enough to expose a faulty KV cache, few enough for many prompts"""
MIN_COMPLETIONS = 32
MAX_PROMPTS = 64
"""per round"""
MAX_ROUNDS = 16
UNKNOWN = "unknown"
"""precision of an engine that does not say"""


@dataclass(frozen=True)
class ExaminedTokens:
    """Completions, and their T tokens packed in the order of the completions."""

    sequences: list[TrainSequence]
    recorded: Tensor
    """[T] float64, the log-probs that the engine recorded"""
    provenance: Provenance

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.recorded)

    def with_anchor_logp(self) -> "ExaminedTokens":
        """Return the same tokens with the anchor's log-probs in the place of the recorded ones."""
        sequences = [
            replace(sequence, completion=_with_anchor_logp(sequence.completion))
            for sequence in self.sequences
        ]
        recorded = [sequence.completion.behavior_logp.double() for sequence in sequences]
        return ExaminedTokens(sequences, torch.cat(recorded), self.provenance)


def _with_anchor_logp(completion: Completion) -> Completion:
    """Replace the behavior log-probs by the anchor's, as training does; keep them without one."""
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
    """Generate completions of the task's first prompts until there are `num_tokens` tokens.

    `label` becomes part of the prompts' ids, which seed the random numbers: different labels give
    independent samples.
    """
    longest = min(sampling.max_tokens, MAX_COMPLETION_TOKENS, max(num_tokens // MIN_COMPLETIONS, 1))
    sampling = replace(sampling, max_tokens=longest)
    num_prompts = min(math.ceil(num_tokens / (longest * SAMPLES_PER_PROMPT)), MAX_PROMPTS)
    sequences: list[TrainSequence] = []
    recorded: list[Tensor] = []
    for round_number in range(MAX_ROUNDS):
        first = round_number * num_prompts
        prompts = [prompt_at(first + index) for index in range(num_prompts)]
        named = [replace(prompt, id=f"doctor-{label}-{prompt.id}") for prompt in prompts]
        groups = collect(
            engine,
            policy,
            named,
            task=None,  # the first turn is enough
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
