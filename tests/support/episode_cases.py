"""Environments for tests, and episodes of a real model in them."""

from collections.abc import Sequence
from dataclasses import dataclass

from trustbatch.models.policy import Policy
from trustbatch.rollout.collect import collect
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.types import Prompt, Role, RolloutGroup, SamplingParams, Turn

PROMPTS = ("12+34=", "9=", "55+44=")


@dataclass(frozen=True)
class Chatter:
    """Answers with the number of tokens that the policy said, and ends by the conversation."""

    name: str = "chatter"
    most_replies: int = 5

    def prompt(self, index: int) -> Prompt:
        return Prompt(id=str(index), text=PROMPTS[index % len(PROMPTS)], answer="")

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        assert [turn.role for turn in turns[::2]] == [Role.POLICY] * (len(turns) // 2 + 1)
        assert all(turn.role is Role.ENVIRONMENT for turn in turns[1::2])
        said = turns[-1].text
        if len(turns) // 2 >= self.most_replies or len(said) % 3 == 0:
            return None
        return f"{len(said)}+"

    def grade(self, prompt: Prompt, completion: str) -> float:
        return float(len(completion))


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
