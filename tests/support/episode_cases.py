"""Episodes of a real model in environments."""

from collections.abc import Sequence

from tests.support.own_task import Chatter

from trustbatch.models.policy import Policy
from trustbatch.rollout.collect import collect
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import RolloutGroup, SamplingParams


def sampling_of(policy: Policy, **options: object) -> SamplingParams:
    settings = {"max_tokens": 60, "temperature": 1.5, "top_logprobs": 4, **options}
    return SamplingParams(stop_token_ids=policy.stop_token_ids, **settings)  # type: ignore[arg-type]


def episodes(
    policy: Policy,
    *,
    engine: RolloutEngine | None = None,
    environment: object | None = None,
    indices: Sequence[int] = range(6),
    num_samples: int = 4,
    max_turns: int = 8,
    **options: object,
) -> list[RolloutGroup]:
    """Let the tiny model talk to an environment."""
    task = environment or Chatter()
    return collect(
        engine or NativeEngine(policy, seed=0),
        policy,
        [task.prompt(index) for index in indices],  # type: ignore[attr-defined]
        task=task,  # type: ignore[arg-type]
        num_samples=num_samples,
        sampling=sampling_of(policy, **options),
        max_turns=max_turns,
    )
