"""Rollouts: from prompts to groups of completions."""

from collections.abc import Sequence

from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.rollout.config import MAX_TURNS
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.episodes import play
from trustbatch.tasks.base import Task, is_environment
from trustbatch.types import GenerationRequest, Prompt, RolloutGroup, SamplingParams


def collect(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    task: Task | None,
    num_samples: int,
    sampling: SamplingParams,
    first_group: int = 0,
    max_turns: int = MAX_TURNS,
) -> list[RolloutGroup]:
    """Sample `num_samples` completions per prompt; returns one group per prompt, in order.

    If `task` is an environment it replies, for up to `max_turns` turns per completion; None samples
    the first turn only. `first_group` is the index of the first prompt in the run.
    """
    refuse_repeated(prompts)
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
    groups = [
        RolloutGroup(
            prompt=prompt,
            prompt_token_ids=request.token_ids,
            completions=tuple(completions[number * num_samples : (number + 1) * num_samples]),
        )
        for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
    ]
    if is_environment(task):
        groups = play(engine, policy, task, groups, sampling=sampling, max_turns=max_turns)
    return groups


def refuse_repeated(prompts: Sequence[Prompt]) -> None:
    """Refuse two prompts with one id, which would get the same random numbers."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError(
                f"Two prompts of a batch have the id {prompt.id!r} and would get the same "
                "completions: make the task's `prompt(index)` return a unique id per prompt."
            )
        seen.add(prompt.id)


def encode_checked(policy: Policy, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
    """Tokenize a prompt, and refuse one that leaves no room for the completion."""
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
