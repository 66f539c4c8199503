"""What trackers have stored, read by their own packages."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Steps = dict[int, dict[str, float]]


def read_tensorboard(folder: Path) -> tuple[Steps, dict[str, Any]]:
    """The scalars by step, and the texts by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    steps: Steps = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in steps.setdefault(event.step, {}), f"{tag} twice at {event.step}"
            steps[event.step][tag] = event.value
    texts = {
        tag: {event.step: list(event.tensor_proto.string_val) for event in events.Tensors(tag)}
        for tag in events.Tags()["tensors"]
    }
    return steps, texts


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: wandb's messages in the blocks of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def read_wandb(folder: Path) -> tuple[Steps, dict[str, Any]]:
    """The history by step over all starts; id, name, config, summary and tables."""
    steps: Steps = {}
    found: dict[str, Any] = {"ids": set(), "names": set(), "config": {}, "summary": {}}
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(file):
            if record.HasField("run"):
                found["ids"].add(record.run.run_id)
                found["names"].add(record.run.display_name)
                for item in record.run.config.update:
                    found["config"][item.key] = json.loads(item.value_json)
            elif record.HasField("history"):
                row = dict(map(_wandb_item, record.history.item))
                step = record.history.step.num
                assert step not in steps, f"step {step} twice"
                steps[step] = {k: v for k, v in row.items() if isinstance(v, float)}
            elif record.HasField("summary"):
                found["summary"] |= dict(map(_wandb_item, record.summary.update))
    tables = (folder / "wandb").glob("offline-run-*/files/media/table/*.json")
    found["tables"] = [json.loads(table.read_text()) for table in tables]
    return steps, found


def _wandb_item(item: Any) -> tuple[str, Any]:
    value = json.loads(item.value_json)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return item.key or ".".join(item.nested_key), float(value) if is_number else value


def read_mlflow(folder: Path, run_id: str) -> tuple[Steps, Any]:
    """The history of all metrics by step, and the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "trustbatch"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == run_id
    steps: Steps = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run_id, key):
            assert key not in steps.setdefault(metric.step, {}), f"{key} twice at {metric.step}"
            steps[metric.step][key] = metric.value
    return steps, run


def read_trackio(run_id: str, name: str) -> tuple[Steps, list[dict[str, Any]], dict[str, Any]]:
    """The values by step, the tables, and the configuration."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = [each for each in trackio.Api().runs("trustbatch") if each.id == run_id]
    assert run.name == name
    steps: Steps = {}
    tables = []
    for row in SQLiteStorage.get_logs("trustbatch", run_id=run_id):
        values = {k: v for k, v in row.items() if k not in ("step", "timestamp")}
        if "completions" in values:
            tables.append(values.pop("completions"))
        for key, value in values.items():
            assert key not in steps.setdefault(row["step"], {}), f"{key} twice at {row['step']}"
            steps[row["step"]][key] = value
    return steps, tables, run.config or {}
