"""How the processes of a cluster are doing, for the status file and the metrics."""

import threading
import time
from collections import deque
from collections.abc import Mapping

from trustbatch.cluster.actor_pool import ActorPool, Worker
from trustbatch.loops.producer import RolloutProducer
from trustbatch.loops.session import Session
from trustbatch.observe.status import EngineStatus, RunStatus, WorkerState, WorkerStatus

STEPS_AVERAGED = 10
SECONDS_BETWEEN = 1.0


class LiveStatus:
    """Looks about once a second at engines, reward workers, buffer and waits."""

    def __init__(
        self,
        session: Session,
        engines: ActorPool,
        graders: ActorPool | None,
        producer: RolloutProducer,
    ) -> None:
        state = session.state
        self._producer = producer
        self._state = state
        self._file = session.run.status
        self._engines = engines
        self._graders = graders
        self._status = RunStatus(
            step=state.step,
            steps=session.config.training.steps,
            version=state.step,
            buffer_room=producer.cluster.max_lag // producer.cluster.reuse + 1,
        )
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_AVERAGED)
        self._before: deque[dict[str, tuple[float, float, float]]] = deque(maxlen=STEPS_AVERAGED)
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._before.append(self._counts())
        self._thread = threading.Thread(target=self._keep_looking, name="live status", daemon=True)
        self._thread.start()

    def trained(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Note that a step is done; returns what belongs to its metrics."""
        with self._changing:
            self._steps.append((metrics["time/train_seconds"], metrics["time/step_seconds"]))
            self._status.add_step(step, metrics)
            self._look()
            self._before.append(self._counts())
            return self._status.metrics()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _keep_looking(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN):
            with self._changing:
                self._look()

    def _look(self) -> None:
        status, producer = self._status, self._producer
        status.buffered_batches = len(self._state.pending)
        waits = (("trainer", producer.trainer_waits_for), ("producer", producer.producer_waits_for))
        status.waiting_for = "; ".join(f"{who}: {what}" for who, what in waits if what)
        status.engines = {str(w.number): self._engine_status(w) for w in self._engines.workers}
        status.reward_workers = {
            str(worker.number): WorkerStatus(
                state=_state(worker),
                busy_share=self._rates(worker)[0],
                restarts=worker.restarts,
            )
            for worker in (self._graders.workers if self._graders else ())
        }
        shares = [engine.busy_share for engine in status.engines.values()]
        status.generation_busy_share = sum(shares) / len(shares)
        if self._steps:
            status.trainer_busy_share = sum(t for t, _ in self._steps) / sum(
                s for _, s in self._steps
            )
        pools = self._crews()
        status.restarts = sum(pool.restarts for pool in pools)
        status.last_error = max(pools, key=lambda pool: pool.died).last_death
        self._file.update(status)

    def _engine_status(self, worker: Worker) -> EngineStatus:
        busy_share, tokens_per_second = self._rates(worker)
        return EngineStatus(
            state=_state(worker),
            busy_share=busy_share,
            restarts=worker.restarts,
            tokens_per_second=tokens_per_second,
            version=int(worker.notes.get("version", 0)),
        )

    def _rates(self, worker: Worker) -> tuple[float, float]:
        """Return busy share and tokens a second over the last steps."""
        now, busy, tokens = self._counts_of(worker)
        before, busy_before, tokens_before = self._before[0][worker.name]
        seconds = max(now - before, 1e-9)
        # what a process that died was busy with does not count any more
        busy_share = min(max(busy - busy_before, 0.0) / seconds, 1.0)
        return busy_share, (tokens - tokens_before) / seconds

    def _counts(self) -> dict[str, tuple[float, float, float]]:
        return {w.name: self._counts_of(w) for pool in self._crews() for w in pool.workers}

    @staticmethod
    def _counts_of(worker: Worker) -> tuple[float, float, float]:
        """Return the time, and how long it was busy and how many tokens it has sampled until then."""
        now = time.monotonic()
        current = now - worker.since if worker.chunk is not None and worker.is_ready else 0.0
        return now, worker.busy_seconds + current, worker.notes.get("tokens", 0.0)

    def _crews(self) -> list[ActorPool]:
        return [pool for pool in (self._engines, self._graders) if pool is not None]


def _state(worker: Worker) -> WorkerState:
    if worker.chunk is None:
        return "idle"
    return "busy" if worker.is_ready else "starting"
