"""The jobs of a study: tiny models that must be made first, then every arm with every seed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.observe.run_folder import read_metrics
from trustbatch.studies.folder import EVALUATION_FILE, FAILURE_FILE, RUNS, run_name
from trustbatch.studies.records import key_of, read_records, refuse_other_configuration
from trustbatch.studies.study import Arm, HeldOutTask, Study, set_key
from trustbatch.studies.tiny_models import resolve_tiny_models, tiny_models_in

Kind = Literal["make_model", "train", "benchmark"]
Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One unit of work for a worker process; plain values only, since it is sent as JSON."""

    kind: Kind
    name: str
    folder: str
    """where its results, or its failure, are written"""
    details: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """folders of models that must exist first"""

    def to_dict(self) -> dict[str, Any]:
        """Return the values to send as JSON."""
        return asdict(self)

    @property
    def path(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)

    @property
    def is_compared(self) -> bool:
        """Whether it is one of the study's runs or evaluations, not a preparation."""
        return self.kind != "make_model"

    @property
    def has_failed(self) -> bool:
        """Whether an earlier attempt failed."""
        return (self.path / FAILURE_FILE).is_file()

    @property
    def record(self) -> Mapping[str, Any] | None:
        """Of a run that leaves a record instead of a checkpoint: its file, key and options."""
        return self.details.get("record")

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do; False after a failure, even at the very end."""
        if self.record is not None:  # it may have been run elsewhere after it failed here
            return tuple(self.record["key"]) in read_records(Path(self.record["file"]))
        if self.has_failed:
            return False
        if self.kind == "make_model":
            return self.path.is_dir()
        if self.kind == "benchmark":
            return (self.path / "results.json").is_file()
        if self.details["held_out"] is not None:
            return self.is_trained and (self.path / EVALUATION_FILE).is_file()
        return self.is_trained

    @property
    def is_trained(self) -> bool:
        """Whether its last step is in the metrics, and its last checkpoint has been written."""
        steps = self.details["steps"]
        metrics = read_metrics(self.path)
        is_over = bool(metrics) and metrics[-1]["step"] == steps
        return is_over and (self.path / "checkpoints" / f"step-{steps}").is_dir()


@dataclass(frozen=True, kw_only=True)
class Records:
    """Where finished runs are recorded, and how."""

    file: Path
    commit: str | None = None
    """state of the code, where git does not know it"""
    before: bool = False
    """evaluate before training, too"""


def run_tree(study: Study, arm: Arm, seed: int, *, out: Path, models: Path) -> dict[str, Any]:
    """Return the configuration of one run: the study's base, the arm's changes, and its folder."""
    tree = resolve_tiny_models(dict(study.base), seed=seed, folder=models)
    for key, value in arm.changes.items():
        set_key(tree, key, resolve_tiny_models(value, seed=seed, folder=models))
    tree["seed"] = seed
    set_key(tree, "run.name", run_name(arm.name, seed))
    set_key(tree, "run.folder", str(out / RUNS))
    return tree


def training_jobs(
    study: Study,
    *,
    out: Path,
    models: Path,
    held_out: HeldOutTask | None,
    records: Records | None = None,
) -> list[Job]:
    """Return all runs, seed by seed, so that a study cut short has all arms of its first seeds."""
    runs = []
    known = read_records(records.file) if records else {}
    for seed in study.seeds:
        for arm in study.arms:
            tree = run_tree(study, arm, seed, out=out, models=models)
            try:
                config = parse_config(tree)
            except ConfigError as error:
                raise ConfigError(f"The arm {arm.name!r} is invalid: {error}") from error
            name = run_name(arm.name, seed)
            evaluation = None
            if held_out is not None:
                evaluation = {**asdict(held_out), "max_tokens": config.rollout.max_tokens}
            record = None
            if records is not None:
                assert evaluation is not None, "a record is a held-out reward"
                key = key_of(arm, seed)
                if key in known:
                    refuse_other_configuration(known[key], tree, evaluation, records.file)
                set_key(tree, "run.keep_checkpoints", 0)
                record = {**asdict(records), "file": str(records.file), "key": key}
            runs.append(
                Job(
                    kind="train",
                    name=name,
                    folder=str(out / RUNS / name),
                    details={
                        "tree": tree,
                        "steps": config.training.steps,
                        "held_out": evaluation,
                        "record": record,
                    },
                    needs=tuple(str(path) for path in tiny_models_in(tree)),
                )
            )
    return [*model_jobs(runs), *runs]


def model_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that make the models which other jobs need, in the order of need."""
    paths = dict.fromkeys(path for job in jobs for path in job.needs)
    return [Job(kind="make_model", name=Path(path).name, folder=path) for path in paths]
