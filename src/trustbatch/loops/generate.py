"""Sampling a batch: prompts, completions and grades, and again where groups teach nothing."""

import math

from trustbatch.plan.shortage import memory_advice
from trustbatch.rollout.collect import collect
from trustbatch.session import Session
from trustbatch.tasks import LearningTask
from trustbatch.types import RolloutGroup


def sample_ahead(session: Session, *, num_batches: int) -> None:
    """Sample until so many batches are pending."""
    while len(session.loop.pending) < num_batches:
        sample_batch(session)


def sample_batch(session: Session) -> None:
    """Append one batch to those that are pending, and how its sampling went."""
    if session.config.rollout.dynamic_sampling:
        session.loop.sampling_metrics.append(_sample_unequal(session))
    else:
        session.loop.pending.append(_sample_round(session))
        session.loop.sampling_metrics.append({})


def _sample_unequal(session: Session) -> dict[str, float]:
    """Append a batch of groups with unequal rewards; those beyond the need are for the next one.

    If there are too few after `rollout.max_sampling_rounds` rounds, groups of the last round fill
    the batch: all their advantages are zero.
    """
    loop, rollout = session.loop, session.config.rollout
    kept, equal, num_sampled, num_unequal, num_rounds = loop.spare, [], 0, 0, 0
    while len(kept) < rollout.prompts_per_step and num_rounds < rollout.max_sampling_rounds:
        groups = _sample_round(session)
        unequal = [group for group in groups if is_unequal(group)]
        equal = [group for group in groups if not is_unequal(group)]
        kept = kept + unequal
        num_sampled += len(groups)
        num_unequal += len(unequal)
        num_rounds += 1
    num_missing = max(rollout.prompts_per_step - len(kept), 0)
    loop.pending.append(kept[: rollout.prompts_per_step] + equal[:num_missing])
    loop.spare = kept[rollout.prompts_per_step :]
    return {
        "dynamic/rounds": float(num_rounds),
        "dynamic/groups_sampled": float(num_sampled),
        "dynamic/groups_kept": float(num_unequal),
        "dynamic/groups_spare": float(len(loop.spare)),
        "dynamic/groups_missing": float(num_missing),
    }


def is_unequal(group: RolloutGroup) -> bool:
    """Whether the samples of a group have different rewards; those without a grade don't count."""
    rewards = {grade.reward for grade in group.grades if math.isfinite(grade.reward)}
    return len(rewards) > 1


def _sample_round(session: Session) -> list[RolloutGroup]:
    """Sample and grade the completions of the next prompts that no batch has taken yet."""
    config, loop = session.config, session.loop
    with memory_advice(config, session.task, "generate"):
        groups = _sample_prompts(session)
    graded = session.scorer.score(groups)
    if isinstance(session.task, LearningTask):
        session.task.observe(graded)
        loop.task = session.task.state()
    return graded


def _sample_prompts(session: Session) -> list[RolloutGroup]:
    rollout = session.config.rollout
    first = session.loop.num_prompts
    prompts = [session.task.prompt(first + i) for i in range(rollout.prompts_per_step)]
    session.loop.num_prompts += len(prompts)
    groups = collect(
        session.engine,
        session.policy,
        prompts,
        task=session.task,
        num_samples=rollout.samples_per_prompt,
        sampling=session.sampling,
        first_group=first,
        max_turns=rollout.max_turns,
    )
    session.loop.num_tokens += sum(len(c.token_ids) for g in groups for c in g.completions)
    return groups
