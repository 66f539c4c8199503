"""The producer: a thread that generates and grades batches while the main thread trains."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.config import Config
from trustbatch.config.cluster import ClusterConfig
from trustbatch.errors import EngineError
from trustbatch.loops.generate import BatchGenerator
from trustbatch.loops.session import Session
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import RolloutBatch, RolloutGroup

CLOSE_SECONDS = 60.0


class VersionedEngines(Protocol):
    """Engines that can sample from any version that is still published."""

    @property
    def version(self) -> int:
        """The newest version that was published."""
        ...

    def at(self, version: int) -> RolloutEngine:
        """Return an engine that samples from a published version."""
        ...

    def in_flight(self) -> RolloutEngine:
        """Return an engine that always samples from the newest version."""
        ...

    def forget_before(self, version: int) -> None:
        """Free versions that nobody will ask for again."""
        ...

    def take_canary(self) -> dict[str, float]:
        """Return the largest differences that were measured since the last call."""
        ...


class RolloutProducer:
    """Generates the batches of a run one after the other, each from the version it belongs to.

    Consumes prompts of the task, and versions of the policy that the main thread has published.
    Waits for the version that samples the next batch, which keeps it from running ahead.
    Unblocked by `advance`. Produces graded batches, oldest first, in `state.pending`.

    The state of the run changes only when a batch is complete, all at once: a batch that is being
    generated does not exist yet, and after a resume it is generated again, to the same tokens. With
    `cluster.in_flight`, a version that is published meanwhile samples the rest of the batch.
    """

    def __init__(
        self,
        config: Config,
        state: LoopState,
        generator: BatchGenerator,
        engines: VersionedEngines,
    ) -> None:
        assert config.cluster is not None
        self.config = config
        self.cluster: ClusterConfig = config.cluster
        self.state = state
        self.num_batches = -(-config.training.steps // self.cluster.reuse)
        self.num_produced = state.step // self.cluster.reuse + len(state.pending)
        self.trainer_waits_for = ""
        self.producer_waits_for = ""
        self._generator = generator
        self._engines = engines
        self._version = state.step
        # older versions are gone; an extended run would otherwise ask for them
        self._oldest_version = state.step
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="producer", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Allow batches from the version that was just published; drop a batch that is used up."""
        with self._changed:
            self._version = self.state.step
            if self.state.step % self.cluster.reuse == 0:
                self.state.pending.popleft()
            self._changed.notify_all()

    def oldest(self) -> RolloutBatch:
        """Wait for the next batch, and return it; it stays pending."""
        number = self.state.step // self.cluster.reuse + 1
        with self._changed:
            self._await(
                lambda: bool(self.state.pending),
                self.config.batch_timeout,
                "trainer_waits_for",
                f"batch {number} from version {self.config.version_for(number)}",
                "cluster.generate_seconds",
            )
            return self.state.pending[0]

    def checkpoint_state(self) -> LoopState:
        """Return what a checkpoint must hold, once nothing of it is still being generated.

        Waits for the batches of older versions: after a resume only the current version exists.
        What that one samples, it can sample again; with `cluster.in_flight` that is true of every
        batch, so none is waited for.
        """
        number = 0
        if not self.cluster.in_flight:
            versions = map(self.config.version_for, range(1, self.num_batches + 1))
            number = sum(version < self.state.step for version in versions)
        with self._changed:
            self._await(
                lambda: self.num_produced >= number,
                self.config.checkpoint_timeout,
                "trainer_waits_for",
                f"batch {number}, without which a checkpoint would not be complete,",
                "cluster.generate_seconds",
            )
            return replace(self.state, pending=deque(self.state.pending))

    def close(self) -> None:
        """End the thread; engines that may still be sampling must have been closed before."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            while self.num_produced < self.num_batches:
                version = self.config.version_for(self.num_produced + 1)
                version = max(version, self._oldest_version)
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
                self._produce(version)
        except BaseException as error:  # whatever it is, the main thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _produce(self, version: int) -> None:
        """Generate one batch, and add it to the state of the run."""
        if self.cluster.in_flight:
            # no engine goes back to an older one
            self._engines.forget_before(self._engines.version)
            engine = self._engines.in_flight()
        else:
            self._engines.forget_before(version)
            engine = self._engines.at(version)
        batch, cursor = self._generator.generate(engine, self.state.cursor)
        batch = replace(batch, metrics=batch.metrics | self._engines.take_canary())
        with self._changed:
            self.state.pending.append(batch)
            self.state.cursor = cursor
            self.num_produced += 1
            self._changed.notify_all()

    def _await(
        self, is_done: Callable[[], bool], seconds: float, who: str, awaited: str, key: str
    ) -> None:
        """Wait, with the lock held, for something that the other thread does."""
        deadline = time.monotonic() + seconds
        setattr(self, who, awaited)
        while not is_done():
            if self._failure is not None:
                raise self._failure
            if not self._changed.wait(deadline - time.monotonic()):
                raise EngineError(
                    f"Timed out after {seconds:.0f} seconds waiting for {awaited}: see what the "
                    f"engines and the trainers do, or raise {key}; the same command continues the "
                    "run from its last checkpoint."
                )
        setattr(self, who, "")


def refuse_too_old(session: Session, groups: Sequence[RolloutGroup]) -> None:
    """Make sure that no token of the policy is older than `cluster.max_lag` allows."""
    cluster = session.config.cluster
    assert cluster is not None
    for group in groups:
        for completion in group.completions:
            if completion.provenance.policy != session.policy.name:
                continue
            for version in completion.all_versions:
                if not 0 <= session.state.step - version <= cluster.max_lag:
                    raise EngineError(
                        f"Prompt {group.prompt.id!r} was answered by version {version}, which is "
                        f"not within cluster.max_lag = {cluster.max_lag} of version "
                        f"{session.state.step}: report this as a bug in the scheduler."
                    )
