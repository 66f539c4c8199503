"""The status of a run that samples and trains in turns."""

from collections import deque
from collections.abc import Mapping

from trustbatch.observe.status import EngineStatus, RunStatus, StatusFile

STEPS_AVERAGED = 10


class StepStatus:
    """Tells the status file what the synchronous loop is at; all its engines count as one."""

    def __init__(self, file: StatusFile, *, step: int, steps: int, lag: int, engine: str) -> None:
        self._file = file
        self._engine = EngineStatus(state="idle", version=step)
        self._status = RunStatus(
            step=step,
            steps=steps,
            version=step,
            buffer_room=lag,
            engines={engine: self._engine},
        )
        self._num_tokens = 0
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=STEPS_AVERAGED)
        file.update(self._status)

    def samples(self) -> None:
        """Completions are being sampled and graded."""
        self._engine.state = "busy"
        self._file.update(self._status)

    def trains(self, *, buffered_batches: int) -> None:
        """A batch is being trained on, and so many wait behind it."""
        self._engine.state = "idle"
        self._status.buffered_batches = buffered_batches
        self._file.update(self._status)

    def trained(self, step: int, metrics: Mapping[str, float], *, num_tokens: int) -> None:
        """A step is done, and so many tokens were sampled since the run was started."""
        status, engine = self._status, self._engine
        status.add_step(step, metrics)
        engine.version = step
        self._recent.append((num_tokens - self._num_tokens, metrics))
        self._num_tokens = num_tokens
        seconds = self._sum("time/step_seconds")
        status.trainer_busy_share = self._sum("time/train_seconds") / seconds
        status.generation_busy_share = self._sum("time/generate_seconds") / seconds
        engine.busy_share = status.generation_busy_share
        engine.tokens_per_second = sum(tokens for tokens, _ in self._recent) / seconds
        self._file.update(status)

    def _sum(self, name: str) -> float:
        return sum(metrics[name] for _, metrics in self._recent)
