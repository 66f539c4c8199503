"""The synchronous loop: generate, score, train, publish, one after the other."""

import time

from trustbatch.loops.generate import sample_ahead
from trustbatch.loops.step import is_checkpoint_due, train_on, write_down
from trustbatch.observe.progress import Progress
from trustbatch.observe.step_status import StepStatus
from trustbatch.session import Session


def train_sync(session: Session, progress: Progress) -> dict[str, float]:
    """Train until the configured number of steps is done, or until the session is asked to stop;
    returns the last step's metrics.

    With `rollout.lag` = L, the batch trained at version v was sampled by version v - L (by version
    0 in the first L steps): batches wait in `loop.pending`, as they would between two machines
    that run side by side (`async_loop.py`).
    """
    config, loop, metrics = session.config, session.loop, {}
    status = StepStatus(
        session.run.status,
        step=loop.step,
        steps=config.training.steps,
        lag=config.rollout.lag,
        engine=config.rollout.engine,
    )
    session.canary.at_start(version=loop.step)
    session.evaluation.before_first_step(loop.step)
    while loop.step < config.training.steps:
        started = time.perf_counter()
        status.samples()
        num_ahead = min(config.rollout.lag, config.training.steps - loop.step - 1)
        sample_ahead(session, num_batches=num_ahead + 1)
        groups, metrics = loop.take_batch()
        status.trains(buffered_batches=len(loop.pending))
        trained, advantages = train_on(session, groups, started=started)
        metrics = metrics | trained  # a checkpoint that is being written may hold what it was
        metrics["time/generation_busy_share"] = (
            metrics["time/generate_seconds"] / metrics["time/step_seconds"]
        )
        metrics |= session.evaluation.after_step(loop.step)
        write_down(session, groups, advantages, metrics)
        is_asked_to_stop = loop.step < config.training.steps and session.is_asked_to_stop()
        if is_checkpoint_due(session) or is_asked_to_stop:
            session.checkpointer.save(loop)
        session.checkpointer.raise_failure()
        status.trained(loop.step, metrics, num_tokens=loop.num_tokens)
        progress.update(loop.step, metrics)
        if is_asked_to_stop:
            session.checkpointer.finish()
            session.run.status.close("stopped")
            break
    session.checkpointer.finish()
    return metrics
