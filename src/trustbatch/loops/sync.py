"""The synchronous loop: generate, score, train, publish; the whole of it is on this screen."""

import time

from trustbatch.advantages import ADVANTAGES
from trustbatch.batching.samples import to_sequences
from trustbatch.loops.draw import draw_ahead
from trustbatch.observe.progress import Progress
from trustbatch.observe.rollout_metrics import rollout_metrics
from trustbatch.observe.step_status import StepStatus
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import rewards_of
from trustbatch.session import Session


def train_sync(session: Session, progress: Progress) -> dict[str, float]:
    """Train until the configured number of steps is done; returns the last step's metrics.

    With `rollout.lag` = L, the batch trained at version v was drawn by version v - L (by version 0
    in the first L steps): batches wait in `loop.pending`, as they would between two machines
    that run side by side.
    """
    config, run, loop, metrics = session.config, session.run, session.loop, {}
    status = StepStatus(run.status, config, step=loop.step)
    session.canary.at_start(version=loop.step)
    for step in range(loop.step + 1, config.training.steps + 1):
        start = time.perf_counter()
        status.draws()
        num_ahead = min(config.rollout.lag, config.training.steps - step)
        metrics = draw_ahead(session, num_batches=num_ahead + 1)
        groups = loop.pending.popleft()
        status.trains(buffered_batches=len(loop.pending))
        generated = time.perf_counter()

        rewards = rewards_of(groups)
        advantages = ADVANTAGES[config.advantage.name](rewards, **config.advantage.options)
        metrics |= rollout_metrics(groups, policy=session.policy.name, version=loop.step)
        trained_from = time.perf_counter()
        session.engine.sleep()
        with memory_advice(config, session.task, "train"):
            metrics |= session.trainer.train(to_sequences(groups, advantages), version=loop.step)
        loop.step = step
        session.engine.wake()
        session.engine.load_weights(session.policy.named_weights(), version=step)
        metrics |= session.canary.after_update(version=step)
        end = time.perf_counter()

        metrics["time/generate_seconds"] = generated - start
        metrics["time/train_seconds"] = end - trained_from
        metrics["time/step_seconds"] = end - start
        metrics["time/trainer_busy_share"] = (end - trained_from) / (end - start)
        metrics["time/generation_busy_share"] = (generated - start) / (end - start)
        num_tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        metrics["time/tokens_per_second"] = num_tokens / (end - start)
        run.write_metrics(step, metrics)
        if step % config.run.rollouts_every == 0 or step in (1, config.training.steps):
            run.write_rollouts(step, groups, advantages)
        if step % config.run.checkpoint_every == 0 or step == config.training.steps:
            session.checkpointer.save(loop)
        session.checkpointer.raise_failure()
        status.trained(step, metrics, num_tokens=loop.num_tokens)
        progress.update(step, metrics)
    session.checkpointer.finish()
    return metrics
