"""The source of a run with [cluster]: engines generate batches while the trainers train."""

from collections.abc import Mapping
from dataclasses import dataclass

from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.cluster.actor_pool import ActorPool
from trustbatch.cluster.engine_pool import EnginePool
from trustbatch.cluster.live_status import LiveStatus
from trustbatch.loops.producer import RolloutProducer, refuse_too_old
from trustbatch.loops.session import Session
from trustbatch.loops.sources import batch_generator
from trustbatch.training.canary import CanaryRecorder
from trustbatch.types import RolloutBatch
from trustbatch.utils.distributed import from_rank_zero, patient_group


@dataclass(kw_only=True)
class ClusterSession(Session):
    """A session whose engines, and perhaps graders, are processes of their own."""

    canary_recorder: CanaryRecorder
    """what engines are checked against when they load a version"""
    engine_pool: EnginePool | None
    """on rank 0 only"""
    reward_pool: ActorPool | None
    """likewise, where there are reward workers"""

    def check_engine(self) -> None:
        """Publish the policy first: the engines have nothing to sample from yet."""
        self.publish(version=self.state.step)
        super().check_engine()

    def publish(self, *, version: int) -> dict[str, float]:
        """Publish the policy as a new version; engines check it when they load it."""
        every = self.config.updates_per_canary
        reference = self.canary_recorder.record(version) if every and version % every == 0 else None
        if self.engine_pool is not None:
            self.engine_pool.expect(reference)
        self.engine.load_weights(self.policy.named_weights(), version=version)
        return {}


class ClusterSource:
    """Batches from a producer thread on rank 0, each used in `cluster.reuse` steps.

    With `cluster.max_lag` = L, the batch trained at version v was sampled by version v - L (by
    version 0 in the first L steps), as in a run without [cluster] with `rollout.lag` = L: which
    side is faster decides how long a run takes, and nothing else. Dynamic sampling keeps groups for
    the next batch, so it samples from a version that is fresher by one batch. With
    `cluster.in_flight` that version is only the oldest that may sample a token of the batch.
    """

    def __init__(self, session: ClusterSession) -> None:
        self.session = session
        # rank 0 may wait long for a batch, and the others for rank 0
        self._patient_group = patient_group(session.config.checkpoint_timeout)
        self._producer: RolloutProducer | None = None
        self._status: LiveStatus | None = None

    def start(self) -> None:
        """Publish the policy, and begin to generate on rank 0."""
        session = self.session
        if session.state.step >= session.config.training.steps:
            return  # nothing is left to generate or to train
        session.check_engine()
        pool = session.engine_pool
        if pool is None:
            return
        generator = batch_generator(session)
        self._producer = RolloutProducer(session.config, session.state, generator, pool)
        self._status = LiveStatus(session, pool.pool, session.reward_pool, self._producer)

    def next_batch(self) -> RolloutBatch:
        """Wait for the oldest batch; rank 0 sends it to the others."""
        batch = from_rank_zero(
            self._producer.oldest() if self._producer else None, group=self._patient_group
        )
        refuse_too_old(self.session, batch.groups)
        return batch

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Let the producer use the new version; returns how engines and graders keep up."""
        if not self._producer or not self._status:
            return {}
        self._producer.advance()
        return self._status.trained(self.session.state.step, metrics)

    def checkpoint_state(self) -> LoopState:
        """Wait for the batches that older versions still generate. Collective."""
        state = LoopState(step=self.session.state.step)
        if self._producer:
            state = self._producer.checkpoint_state()
        from_rank_zero(None, group=self._patient_group)  # all wait, and then save together
        return state

    def broadcast(self, value: bool) -> bool:
        """Return rank 0's value on every rank."""
        return from_rank_zero(value, group=self._patient_group)

    def close(self) -> None:
        """End engines and graders first, or the producer may be waiting for one of them."""
        if self._producer:
            self.session.engine.close()
            self.session.scorer.close()
            self._producer.close()
        if self._status:
            self._status.close()
