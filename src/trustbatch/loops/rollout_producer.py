"""The producer: a thread that samples and grades batches while the main thread trains."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.config.cluster import ClusterConfig
from trustbatch.errors import EngineError
from trustbatch.loops.generate import sample_batch
from trustbatch.session import Session
from trustbatch.types import RolloutGroup

CLOSE_SECONDS = 60.0


class RolloutProducer:
    """Samples the batches of a run one after the other, each from the version that it belongs to.

    Consumes prompts of the task, and versions of the policy that the main thread has published.
    Waits for the version that samples the next batch, which is what keeps it from running ahead.
    Unblocked by `trained`. Produces graded batches, the oldest first, in `session.loop.pending`.

    The state of the run changes only when a batch is complete, all at once: a batch that is being
    sampled does not exist yet, and after a resume it is sampled again, to the same tokens. With
    `cluster.in_flight` a version that comes out meanwhile samples the rest of the batch.
    """

    def __init__(self, session: Session) -> None:
        assert session.config.cluster is not None
        assert session.engine_pool is not None
        self.session = session
        self.cluster: ClusterConfig = session.config.cluster
        self.engine_pool = session.engine_pool
        self.num_batches = -(-session.config.training.steps // self.cluster.reuse)
        loop = session.loop
        self.num_sampled = loop.step // self.cluster.reuse + len(loop.pending)
        self.trainer_waits_for = ""
        self.producer_waits_for = ""
        self._sampling = LoopState(
            num_prompts=loop.num_prompts, spare=list(loop.spare), task=copy.deepcopy(loop.task)
        )
        self._version = loop.step
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="producer", daemon=True)
        self._thread.start()

    def trained(self) -> None:
        """Let batches be sampled from the version that the engine pool has by now, and forget old ones."""
        loop = self.session.loop
        with self._changed:
            self._version = loop.step
            if loop.step % self.cluster.reuse == 0:
                loop.take_batch()
            self._changed.notify_all()

    def oldest(self) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Wait for the next batch; returns it, and how its sampling went. It stays pending."""
        loop = self.session.loop
        number = loop.step // self.cluster.reuse + 1
        with self._changed:
            self._await(
                lambda: bool(loop.pending),
                self.session.config.batch_seconds,
                "trainer_waits_for",
                f"batch {number} from version {self.session.config.version_for(number)}",
                "cluster.generate_seconds",
            )
            return loop.pending[0], loop.sampling_metrics[0]

    def state(self) -> LoopState:
        """Return what a checkpoint must hold, once nothing of it is still being sampled.

        Waits for the batches that older versions sample: after a resume only the present version is
        there. What the present one samples, it can sample again; with `cluster.in_flight` that is
        true of every batch, so none is waited for.
        """
        loop = self.session.loop
        version_for, number = self.session.config.version_for, 0
        if not self.cluster.in_flight:
            number = sum(version_for(b) < loop.step for b in range(1, self.num_batches + 1))
        with self._changed:
            self._await(
                lambda: self.num_sampled >= number,
                self.session.config.batches_seconds,
                "trainer_waits_for",
                f"batch {number}, without which a checkpoint would not be complete,",
                "cluster.generate_seconds",
            )
            return replace(
                loop, pending=deque(loop.pending), sampling_metrics=deque(loop.sampling_metrics)
            )

    def close(self) -> None:
        """End the thread; the engine pool must have been closed if it may still be sampling."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            while self.num_sampled < self.num_batches:
                version = self.session.config.version_for(self.num_sampled + 1)
                with self._changed:
                    self._await(
                        lambda version=version: self._closing or self._version >= version,
                        self.cluster.train_seconds,
                        "producer_waits_for",
                        f"version {version}",
                        "cluster.train_seconds",
                    )
                    if self._closing:
                        return
                self._sample(version)
        except BaseException as error:  # whatever it is, the main thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _sample(self, version: int) -> None:
        """Sample one batch, and add it to the state of the run."""
        if self.cluster.in_flight:
            self.engine_pool.forget_before(
                self.engine_pool.version
            )  # no engine goes back to an older one
            engine = self.engine_pool.in_flight()
        else:
            self.engine_pool.forget_before(version)
            engine = self.engine_pool.at(version)
        sample_batch(replace(self.session, engine=engine, loop=self._sampling))
        groups, metrics = self._sampling.take_batch()
        metrics |= self.engine_pool.take_canary()
        loop = self.session.loop
        with self._changed:
            loop.pending.append(groups)
            loop.sampling_metrics.append(metrics)
            loop.num_prompts = self._sampling.num_prompts
            loop.spare = list(self._sampling.spare)
            loop.task = copy.deepcopy(self._sampling.task)
            self.num_sampled += 1
            self._changed.notify_all()

    def _await(
        self, is_there: Callable[[], bool], seconds: float, who: str, awaited: str, key: str
    ) -> None:
        """Wait, with the lock held, for something that the other thread does."""
        deadline = time.monotonic() + seconds
        setattr(self, who, awaited)
        while not is_there():
            if self._failure is not None:
                raise self._failure
            if not self._changed.wait(deadline - time.monotonic()):
                raise EngineError(
                    f"Waited {seconds:.0f} seconds for {awaited} in vain: see what the engines and "
                    f"the trainers do, or raise {key}; the same command continues the run from its "
                    "last checkpoint."
                )
        setattr(self, who, "")
