"""Trackers: where a run's metrics and completions are shown, chosen by `run.trackers`."""

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.observe.config import TrackerName
from trustbatch.observe.status import RunState
from trustbatch.observe.trackers.background import BackgroundTracker, MemoryFile
from trustbatch.observe.trackers.base import TrackedRun, Tracker, table_rows
from trustbatch.observe.trackers.mlflow_tracker import MLflow
from trustbatch.observe.trackers.tensorboard_tracker import TensorBoard
from trustbatch.observe.trackers.trackio_tracker import Trackio
from trustbatch.observe.trackers.wandb_tracker import WeightsAndBiases
from trustbatch.utils.terminal import LiveLine

REGISTRY: dict[TrackerName, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
FINISH_SECONDS = 30.0
"""that the end of a run waits for all trackers together"""
EVALUATION = "eval/"


def require_packages(names: Sequence[TrackerName]) -> None:
    """Refuse a tracker whose package is not installed."""
    for name in names:
        missing = [each for each in REGISTRY[name].packages if find_spec(each) is None]
        if missing:
            raise ConfigError(
                f"run.trackers has {name!r}, which needs the package {missing[0]}: "
                f"pip install 'trustbatch[{name}]', or leave it out."
            )


class Trackers:
    """All trackers of a run, each beside it: one that fails is left out, which is said once."""

    def __init__(
        self,
        names: Sequence[TrackerName],
        run: TrackedRun,
        lines: Sequence[Mapping[str, Any]],
    ) -> None:
        """Start them; `lines` is what metrics.jsonl has so far."""
        self._evaluation: dict[str, float] = {}
        for line in lines:
            self._note_evaluation(line)
        memories = MemoryFile(run.folder)
        self._running = [
            BackgroundTracker(name, REGISTRY[name](), run, memories, lines) for name in names
        ]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._note_evaluation(metrics)
        for tracker in self._running:
            tracker.log(step, metrics)
        self._leave_out_failed()

    def log_completions(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Send completions, in the form of rollouts/."""
        rows = table_rows(records)
        for tracker in self._running:
            tracker.log_completions(step, rows)

    def finish(self, state: RunState) -> None:
        """Send how the run ended, and wait for the trackers, though not forever."""
        deadline = time.monotonic() + FINISH_SECONDS
        for tracker in self._running:
            tracker.finish(state, self._evaluation)
        for tracker in self._running:
            tracker.join(deadline)
        self._leave_out_failed()
        self._running = []

    def _note_evaluation(self, metrics: Mapping[str, Any]) -> None:
        found = {key: value for key, value in metrics.items() if key.startswith(EVALUATION)}
        self._evaluation = found or self._evaluation

    def _leave_out_failed(self) -> None:
        failed = [tracker for tracker in self._running if tracker.failure]
        self._running = [tracker for tracker in self._running if tracker not in failed]
        for tracker in failed:
            LiveLine().warn(
                f"The tracker {tracker.name} is left out from now on ({tracker.failure}): the run "
                "goes on, and a resumed run sends what it lacks."
            )
