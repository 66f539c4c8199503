"""The mean reward of a model on the first prompts of a task; writes no files."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from trustbatch.models.policy import Policy
from trustbatch.rewards import Scorer, rewards_of
from trustbatch.rollout.collect import collect
from trustbatch.rollout.config import MAX_TURNS
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.tasks import Task
from trustbatch.tasks.base import close_task
from trustbatch.types import RolloutGroup, SamplingParams

NORMAL_95 = 1.96


@dataclass(frozen=True)
class EvaluationResult:
    """A mean reward over prompts; samples of the same prompt are not independent."""

    mean_reward: float
    standard_error: float
    """of the mean over prompts"""
    num_prompts: int
    """prompts with a graded sample"""
    num_samples: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return the ends of the 95% interval over prompts."""
        half = NORMAL_95 * self.standard_error
        return self.mean_reward - half, self.mean_reward + half


def evaluate(
    policy: Policy,
    task: Task,
    *,
    num_prompts: int,
    num_samples: int,
    max_tokens: int,
    max_turns: int = MAX_TURNS,
    temperature: float = 1.0,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> EvaluationResult:
    """Sample `num_samples` completions per prompt of the task's first prompts, and grade them."""
    sampling = SamplingParams(
        max_tokens=max_tokens, stop_token_ids=policy.stop_token_ids, temperature=temperature
    )
    engine = NativeEngine(policy, seed=seed)
    prompts = [task.prompt(index) for index in range(num_prompts)]
    groups: list[RolloutGroup] = []
    # a few full batches at a time, so that progress is visible
    prompts_per_batch = max(4 * engine.max_sequences // num_samples, 1)
    for start in range(0, num_prompts, prompts_per_batch):
        part = prompts[start : start + prompts_per_batch]
        groups += collect(
            engine,
            policy,
            part,
            task=task,
            num_samples=num_samples,
            sampling=sampling,
            max_turns=max_turns,
        )
        say(f"{len(groups)}/{num_prompts} prompts")
    with contextlib.closing(Scorer(task)) as scorer:
        per_prompt = rewards_of(scorer.score(groups)).nanmean(dim=1)
    close_task(task)
    per_prompt = per_prompt[~per_prompt.isnan()]  # drop prompts without a grade
    deviation = float(per_prompt.std()) if len(per_prompt) > 1 else math.nan
    return EvaluationResult(
        mean_reward=float(per_prompt.mean()),
        standard_error=deviation / math.sqrt(max(len(per_prompt), 1)),
        num_prompts=len(per_prompt),
        num_samples=num_samples,
    )
