"""The drawer: a thread that draws and grades batches while the main thread trains."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.config import ClusterConfig
from trustbatch.errors import EngineError
from trustbatch.loops.draw import draw_batch
from trustbatch.session import Session
from trustbatch.types import RolloutGroup

CLOSE_SECONDS = 60.0


class Drawer:
    """Draws the batches of a run one after the other, each from the version that it belongs to.

    Consumes prompts of the task, and versions of the policy that the main thread has published.
    Waits for the version that draws the next batch, which is what keeps it from running ahead.
    Unblocked by `trained`. Produces graded batches, the oldest first, in `session.loop.pending`.

    The state of the run changes only when a batch is complete, all at once: a batch that is being
    drawn does not exist yet, and after a resume it is drawn again, to the same tokens. With
    `cluster.in_flight` a version that comes out meanwhile draws the rest of the batch.
    """

    def __init__(self, session: Session) -> None:
        assert session.config.cluster is not None
        assert session.fleet is not None
        self.session = session
        self.cluster: ClusterConfig = session.config.cluster
        self.fleet = session.fleet
        self.num_batches = -(-session.config.training.steps // self.cluster.reuse)
        loop = session.loop
        self.num_drawn = loop.step // self.cluster.reuse + len(loop.pending)
        self.trainer_waits_for = ""
        self.drawer_waits_for = ""
        self._drawing = LoopState(
            num_prompts=loop.num_prompts, spare=list(loop.spare), task=copy.deepcopy(loop.task)
        )
        self._version = loop.step
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="drawer", daemon=True)
        self._thread.start()

    def trained(self) -> None:
        """Let batches be drawn from the version that the fleet has by now, and forget old ones."""
        loop = self.session.loop
        with self._changed:
            self._version = loop.step
            if loop.step % self.cluster.reuse == 0:
                loop.take_batch()
            self._changed.notify_all()

    def oldest(self) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Wait for the next batch; returns it, and how its drawing went. It stays pending."""
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
            return loop.pending[0], loop.drawing[0]

    def state(self) -> LoopState:
        """Return what a checkpoint must hold, once nothing of it is still being drawn.

        Waits for the batches that older versions draw: after a resume only the present version is
        there. What the present one draws, it can draw again; with `cluster.in_flight` that is true
        of every batch, so none is waited for.
        """
        loop = self.session.loop
        version_for, number = self.session.config.version_for, 0
        if not self.cluster.in_flight:
            number = sum(version_for(b) < loop.step for b in range(1, self.num_batches + 1))
        with self._changed:
            self._await(
                lambda: self.num_drawn >= number,
                self.session.config.batches_seconds,
                "trainer_waits_for",
                f"batch {number}, without which a checkpoint would not be complete,",
                "cluster.generate_seconds",
            )
            return replace(loop, pending=deque(loop.pending), drawing=deque(loop.drawing))

    def close(self) -> None:
        """End the thread; the fleet must have been closed if it may still be drawing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            while self.num_drawn < self.num_batches:
                version = self.session.config.version_for(self.num_drawn + 1)
                with self._changed:
                    self._await(
                        lambda version=version: self._closing or self._version >= version,
                        self.cluster.train_seconds,
                        "drawer_waits_for",
                        f"version {version}",
                        "cluster.train_seconds",
                    )
                    if self._closing:
                        return
                self._draw(version)
        except BaseException as error:  # whatever it is, the main thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _draw(self, version: int) -> None:
        """Draw one batch, and add it to the state of the run."""
        if self.cluster.in_flight:
            self.fleet.forget_before(self.fleet.version)  # no engine goes back to an older one
            engine = self.fleet.in_flight()
        else:
            self.fleet.forget_before(version)
            engine = self.fleet.at(version)
        draw_batch(replace(self.session, engine=engine, loop=self._drawing))
        groups, metrics = self._drawing.take_batch()
        metrics |= self.fleet.take_canary()
        loop = self.session.loop
        with self._changed:
            loop.pending.append(groups)
            loop.drawing.append(metrics)
            loop.num_prompts = self._drawing.num_prompts
            loop.spare = list(self._drawing.spare)
            loop.task = copy.deepcopy(self._drawing.task)
            self.num_drawn += 1
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
