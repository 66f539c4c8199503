"""The jobs of a study: models that must be made first, then every arm with every seed."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.studies.job import Job
from trustbatch.studies.resolve import RUNS, run_name, run_tree
from trustbatch.studies.scales.scale import HeldOutTask
from trustbatch.studies.study import Study
from trustbatch.studies.tiny_models import tiny_models_in


def training_jobs(
    study: Study, *, out: Path, models: Path, held_out: HeldOutTask | None
) -> list[Job]:
    """Return all runs, seed by seed, so that a study cut short has all arms of its first seeds."""
    runs = []
    for seed in study.seeds:
        for arm in study.arms:
            tree = run_tree(study, arm, seed, out=out, models=models)
            try:
                config = parse_config(tree)
            except ConfigError as error:
                raise ConfigError(f"The arm {arm.name!r} can't be run: {error}") from error
            name = run_name(arm.name, seed)
            asked = None
            if held_out is not None:
                asked = {**asdict(held_out), "max_tokens": config.rollout.max_tokens}
            runs.append(
                Job(
                    kind="train",
                    name=name,
                    folder=str(out / RUNS / name),
                    details={
                        "tree": tree,
                        "steps": config.training.steps,
                        "held_out": asked,
                    },
                    needs=tuple(str(path) for path in tiny_models_in(tree)),
                )
            )
    return [*model_jobs(runs), *runs]


def model_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return what makes the models that jobs need, those first that are needed first."""
    paths = dict.fromkeys(path for job in jobs for path in job.needs)
    return [Job(kind="make_model", name=Path(path).name, folder=path) for path in paths]
