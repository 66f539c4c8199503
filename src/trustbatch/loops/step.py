"""What every loop does with a graded batch: train on it, publish the weights, write it all down."""

import time
from collections.abc import Sequence

from torch import Tensor

from trustbatch.batching.samples import to_sequences
from trustbatch.observe.rollout_metrics import rollout_metrics
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import rewards_of
from trustbatch.session import Session
from trustbatch.types import RolloutGroup


def train_on(
    session: Session, groups: Sequence[RolloutGroup], *, started: float
) -> tuple[dict[str, float], Tensor]:
    """Take the next step on a batch and publish its weights; returns metrics and advantages.

    `started` is when the step began to wait for the batch.
    """
    config, loop = session.config, session.loop
    generated = time.perf_counter()
    rewards = rewards_of(groups)
    advantages = config.advantage.build()(rewards)
    metrics = rollout_metrics(groups, policy=session.policy.name, version=loop.step)
    trained_from = time.perf_counter()
    session.engine.sleep()
    with memory_advice(config, session.task, "train"):
        metrics |= session.trainer.train(to_sequences(groups, advantages), version=loop.step)
    loop.step += 1
    session.engine.wake()
    metrics |= session.publish(version=loop.step)
    end = time.perf_counter()

    metrics["time/generate_seconds"] = generated - started
    metrics["time/train_seconds"] = end - trained_from
    metrics["time/step_seconds"] = end - started
    metrics["time/trainer_busy_share"] = (end - trained_from) / (end - started)
    num_tokens = sum(c.num_sampled for group in groups for c in group.completions)
    metrics["time/tokens_per_second"] = num_tokens / (end - started)
    return metrics, advantages


def write_down(
    session: Session,
    groups: Sequence[RolloutGroup],
    advantages: Tensor,
    metrics: dict[str, float],
) -> None:
    """Leave the numbers of the step, and now and then its completions, in the run folder."""
    config, step = session.config, session.loop.step
    session.run.write_metrics(step, metrics)
    if step % config.run.rollouts_every == 0 or step in (1, config.training.steps):
        session.run.write_rollouts(step, groups, advantages)


def is_checkpoint_due(session: Session) -> bool:
    """Whether the state after this step is to be saved."""
    config, step = session.config, session.loop.step
    return step % config.run.checkpoint_every == 0 or step == config.training.steps
