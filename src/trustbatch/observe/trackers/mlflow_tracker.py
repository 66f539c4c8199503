"""MLflow: the store that MLFLOW_TRACKING_URI names, or a database in the run folder."""

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from trustbatch.observe.status import RunState
from trustbatch.observe.trackers.base import COLUMNS, PROJECT, Memory, Row, TrackedRun
from trustbatch.utils.tables import flatten

FOLDER = "mlflow"
MAX_PARAMS, MAX_METRICS = 100, 1000
"""that MLflow takes in one call"""
MAX_VALUE = 6000
"""characters of a parameter"""
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
_STATUS: dict[RunState, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
}


class MLflow:
    """A run of MLflow, whose id MLflow gives."""

    packages: ClassVar[tuple[str, ...]] = ("mlflow", "sqlalchemy", "alembic")
    takes_id: ClassVar[bool] = False

    def start(self, run: TrackedRun, memory: Memory) -> None:
        """Open the run or continue it, with the configuration as parameters and as a file."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow: Any = import_module("mlflow.tracking")
        entities: Any = import_module("mlflow.entities")
        for name in ("mlflow", "alembic"):  # each tells of the tables it makes
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = entities.Metric
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder = (run.folder / FOLDER).absolute()
            folder.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client = mlflow.MlflowClient(uri)
        memory.id = memory.id or self._create(run.name, artifacts)
        self._id = memory.id
        self._client.update_run(self._id, status="RUNNING", name=run.name)
        # a parameter can't be changed, so what a resumed run has changed is in the file alone
        known = self._client.get_run(self._id).data.params
        params = [
            entities.Param(_name(key), str(value)[:MAX_VALUE])
            for key, value in flatten(run.config).items()
            if _name(key) not in known
        ]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])
        self._client.log_text(self._id, run.toml, "config.toml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics; their newest values are those of the run."""
        now = int(time.time() * 1000)
        values = [self._metric(_name(key), each, now, step) for key, each in metrics.items()]
        for first in range(0, len(values), MAX_METRICS):
            self._client.log_batch(self._id, metrics=values[first : first + MAX_METRICS])

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Write a file in the form of MLflow's own tables, which need pandas."""
        table = json.dumps({"columns": COLUMNS, "data": rows}, ensure_ascii=False)
        self._client.log_text(self._id, table, f"completions/step-{step:06d}.json")

    def finish(self, state: RunState, evaluation: Mapping[str, float]) -> None:
        """End the run, with the last evaluation as a file; its values are metrics already."""
        if evaluation:
            self._client.log_dict(self._id, dict(evaluation), "evaluation.json")
        self._client.set_terminated(self._id, _STATUS[state])

    def _create(self, name: str, artifacts: str | None) -> str:
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(title)
        if experiment is None:
            number = self._client.create_experiment(title, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        return self._client.create_run(number, run_name=name).info.run_id


def _name(key: str) -> str:
    """Return a name that MLflow allows: pass@1 becomes pass_at_1."""
    return _FORBIDDEN.sub("_", key.replace("@", "_at_"))
