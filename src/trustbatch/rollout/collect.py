"""From prompts to groups of completions."""

from collections.abc import Sequence

from trustbatch.errors import ConfigError
from trustbatch.policy import Policy
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import GenerationRequest, Prompt, RolloutGroup, SamplingParams


def collect(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    sampling: SamplingParams,
    first_group: int = 0,
) -> list[RolloutGroup]:
    """Draw `num_samples` completions of every prompt; one group a prompt, in their order.

    `first_group` is the number of the first prompt in the run.
    """
    requests = [
        GenerationRequest(
            prompt_id=prompt.id,
            token_ids=encode_checked(policy, prompt, sampling.max_tokens),
            num_samples=num_samples,
            sampling=sampling,
            group=first_group + number,
        )
        for number, prompt in enumerate(prompts)
    ]
    completions = engine.generate(requests)
    return [
        RolloutGroup(
            prompt=prompt,
            prompt_token_ids=request.token_ids,
            completions=tuple(completions[number * num_samples : (number + 1) * num_samples]),
        )
        for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
    ]


def encode_checked(policy: Policy, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
    """Tokenise a prompt, and refuse one that leaves no room for the answer."""
    token_ids = policy.encode(prompt)
    if not token_ids:
        raise ConfigError(f"Prompt {prompt.id!r} has no tokens: remove it from the data.")
    if len(token_ids) + max_tokens > policy.context_length:
        raise ConfigError(
            f"Prompt {prompt.id!r} has {len(token_ids)} tokens, which with max_tokens = "
            f"{max_tokens} is more than the model's context of {policy.context_length}: lower "
            "max_tokens or leave out long prompts, with task.max_prompt_tokens where the task has "
            "it."
        )
    return token_ids
