"""Trackio: the database of this machine, where `trackio show` finds it."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from trustbatch.observe.status import RunState
from trustbatch.observe.trackers.base import COLUMNS, PROJECT, Memory, Row, TrackedRun


class Trackio:
    """A run in Trackio's local database.

    Written through its storage: `trackio.init` asks the hub who is logged in, prints, finds a
    resumed run by its name alone, and reports no failure of writing.
    """

    packages: ClassVar[tuple[str, ...]] = ("trackio",)
    takes_id: ClassVar[bool] = True

    def start(self, run: TrackedRun, memory: Memory) -> None:
        """Choose the run's id; the first values bring the configuration."""
        trackio: Any = import_module("trackio")
        self._table = trackio.Table
        self._storage = trackio.sqlite_storage.SQLiteStorage
        self._project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = {"run": run.name, "run_id": memory.id}
        self._config = dict(run.config)
        self._has_config = False
        self._step = memory.last_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        self._write(step, dict(metrics))
        self._step = step

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Write a table; the dashboard shows its strings as they are."""
        table = self._table(columns=list(COLUMNS), data=[*rows])
        self._write(step, {"completions": table._to_dict(self._project, self._run["run"], step)})

    def finish(self, state: RunState, evaluation: Mapping[str, float]) -> None:
        """Put how the run ended and its last evaluation beside the configuration.

        Trackio has no other place for values of a whole run.
        """
        self._config |= {"state": state, "last_evaluation": dict(evaluation)}
        self._has_config = False
        self._write(max(self._step, 0), {})

    def _write(self, step: int, values: dict[str, Any]) -> None:
        self._storage.bulk_log(
            project=self._project,
            metrics_list=[values],
            steps=[step],
            config=None if self._has_config else self._config,
            **self._run,
        )
        self._has_config = True
