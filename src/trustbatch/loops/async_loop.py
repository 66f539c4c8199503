"""The asynchronous loop: batches are sampled by engines of their own while this process trains."""

import time
from collections.abc import Sequence

from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.errors import EngineError
from trustbatch.loops.live_status import LiveStatus
from trustbatch.loops.rollout_producer import RolloutProducer
from trustbatch.loops.step import is_checkpoint_due, train_on, write_down
from trustbatch.observe.progress import Progress
from trustbatch.session import Session
from trustbatch.types import RolloutGroup
from trustbatch.utils.distributed import from_rank_zero, patient_group


def train_async(session: Session, progress: Progress) -> dict[str, float]:
    """Train until the configured number of steps is done, or until the session is asked to stop;
    returns the last step's metrics.

    Consumes graded batches, the oldest first, each in `cluster.reuse` steps.
    Waits for the next batch and, before a checkpoint, for those that older versions still sample.
    Unblocked by the producer, a thread of the first rank, and it unblocks that by new versions.
    Produces a version of the policy in each step, metrics, evaluations and checkpoints.

    With `cluster.max_lag` = L, the batch trained at version v was sampled by version v - L (by
    version 0 in the first L steps), as the synchronous loop has it with `rollout.lag` = L: who is
    faster decides about the time that a run takes, and about nothing else. Dynamic sampling keeps
    groups for the batch after, so it samples from a version that is fresher by one batch. With
    `cluster.in_flight` that version is only the oldest which may sample a token of the batch.
    """
    config, loop, metrics = session.config, session.loop, {}
    if loop.step == config.training.steps:
        return metrics  # nothing is left to sample or to train
    # the first rank may wait long for a batch, and the others for it
    patient = patient_group(config.batches_seconds)
    session.publish(version=loop.step)
    session.canary.at_start(version=loop.step)
    producer = RolloutProducer(session) if session.engine_pool is not None else None
    status = LiveStatus(session, producer) if producer else None
    try:
        session.evaluation.before_first_step(loop.step)
        while loop.step < config.training.steps:
            started = time.perf_counter()
            # ranks other than the first have no producer, and get what it has sampled
            groups, metrics = from_rank_zero(producer.oldest() if producer else None, group=patient)
            refuse_too_old(session, groups)
            trained, advantages = train_on(session, groups, started=started)
            metrics = metrics | trained
            if producer and status:
                producer.trained()
                metrics |= status.trained(loop.step, metrics)
            # while the producer goes on: the engines take turns
            metrics |= session.evaluation.after_step(loop.step)
            write_down(session, groups, advantages, metrics)
            # asked of the first rank alone: they may have been asked at different moments
            is_asked_to_stop = from_rank_zero(session.is_asked_to_stop(), group=patient)
            if is_checkpoint_due(session) or is_asked_to_stop:
                state = producer.state() if producer else LoopState(step=loop.step)
                from_rank_zero(None, group=patient)  # all wait, and then save together
                session.checkpointer.save(state)
            session.checkpointer.raise_failure()
            progress.update(loop.step, metrics)
            if is_asked_to_stop:
                break
        session.checkpointer.finish()
    finally:
        if producer and status:
            session.engine.close()  # or the producer may be waiting for one of them
            session.scorer.close()
            producer.close()
            status.close()
    if loop.step < config.training.steps:
        session.run.status.close("stopped")  # after those who would say that it runs
    return metrics


def refuse_too_old(session: Session, groups: Sequence[RolloutGroup]) -> None:
    """Make sure that no token of the policy is older than `cluster.max_lag` allows."""
    cluster = session.config.cluster
    assert cluster is not None
    for group in groups:
        for completion in group.completions:
            if completion.provenance.policy != session.policy.name:
                continue
            for version in completion.all_versions:
                if not 0 <= session.loop.step - version <= cluster.max_lag:
                    raise EngineError(
                        f"Prompt {group.prompt.id!r} was answered by version {version}, which is "
                        f"not within cluster.max_lag = {cluster.max_lag} of version "
                        f"{session.loop.step}: report this as a fault of the scheduler."
                    )
