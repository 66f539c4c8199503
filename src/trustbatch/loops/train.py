"""The main loop: generate, grade, train, publish, record."""

from trustbatch.batching.sequences import to_sequences
from trustbatch.loops.recorder import Recorder, StepTimer
from trustbatch.loops.session import Session
from trustbatch.loops.sources import BatchSource
from trustbatch.observe.rollout_metrics import rollout_metrics
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import rewards_of


def train(session: Session, source: BatchSource, recorder: Recorder) -> dict[str, float]:
    """Train until the configured number of steps is done, or until the session is asked to stop;
    returns the last step's metrics.

    Synchronous, lagged and clustered runs are this loop over different sources of batches.
    """
    config, state, metrics = session.config, session.state, {}
    source.start()
    recorder.start()
    while state.step < config.training.steps and not recorder.is_stopping:
        timer = StepTimer()
        # prompts -> completions -> rewards
        batch = source.next_batch()
        timer.mark_generated()
        rewards = rewards_of(batch.groups)
        advantages = session.advantages(rewards)
        measured = rollout_metrics(batch.groups, policy=session.policy.name, version=state.step)
        # advantages -> gradients -> weights
        timer.mark_training()
        with session.engine_asleep(), memory_advice(config, session.task, "train"):
            sequences = to_sequences(batch.groups, advantages)
            observation = recorder.observation(batch)
            updated = session.trainer.train(sequences, version=state.step, observation=observation)
        state.step += 1
        # weights -> engines
        published = session.publish(version=state.step)
        timer.mark_published()

        metrics = batch.metrics | measured | updated | published | timer.metrics(batch.groups)
        metrics |= source.after_step(metrics)
        metrics = recorder.record(batch, advantages, metrics, observation)
    recorder.finish()
    return metrics
