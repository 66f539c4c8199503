"""Samples of problems, graded: what becomes the lines of samples.jsonl."""

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

from trustbatch.evaluation.settings import SamplingSettings
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.models.policy import Policy
from trustbatch.rewards import Scorer
from trustbatch.rollout.collect import collect
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import Completion, Grade, Prompt, RolloutGroup
from trustbatch.utils.distributed import on_rank_zero


def sample_records(
    engine: RolloutEngine,
    policy: Policy,
    scorer: Scorer,
    task: EvaluatedTask,
    settings: SamplingSettings,
    *,
    max_sequences: int,
    max_turns: int,
    done: Collection[str] = (),
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of a few problems at a time; problems in `done` are left out.

    Which problems are sampled together does not depend on what is done: another batch could round
    otherwise, and sample another token. With several ranks all of them call this, and get the same.
    """
    sampling = settings.params(policy.stop_token_ids)
    num_at_once = max(max_sequences // settings.samples, 1)
    for start in range(0, len(task.problems), num_at_once):
        problems = task.problems[start : start + num_at_once]
        if all(problem.id in done for problem in problems):
            continue
        prompts = [replace(problem, id=task.sampled_prompt(problem)) for problem in problems]
        groups = collect(
            engine,
            policy,
            prompts,
            task=task.task,
            num_samples=settings.samples,
            sampling=sampling,
            max_turns=max_turns,
        )
        groups = [
            replace(group, prompt=problem)
            for group, problem in zip(groups, problems, strict=True)
            if problem.id not in done
        ]
        graded = on_rank_zero(lambda groups=groups: scorer.score(groups))
        yield [_record(task.name, group) for group in graded]


def _record(task: str, group: RolloutGroup) -> dict[str, Any]:
    prompt: Prompt = group.prompt
    return {
        "task": task,
        "id": prompt.id,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "samples": [
            _sample(completion, grade)
            for completion, grade in zip(group.completions, group.grades, strict=True)
        ],
    }


def _sample(completion: Completion, grade: Grade) -> dict[str, Any]:
    return {
        "text": completion.text,
        **({"turns": [asdict(turn) for turn in completion.turns]} if completion.turns else {}),
        "tokens": completion.num_sampled,
        "finish_reason": str(completion.finish_reason),
        "status": str(grade.status),
        "reward": None if math.isnan(grade.reward) else grade.reward,
        **({"reason": grade.reason} if grade.reason else {}),
    }
