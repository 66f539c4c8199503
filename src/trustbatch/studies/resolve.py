"""From an arm and a seed to the configuration of a run."""

from pathlib import Path
from typing import Any

from trustbatch.studies.study import Arm, Study
from trustbatch.studies.tiny_models import placed
from trustbatch.utils.tables import set_key

RUNS = "runs"


def run_name(arm: str, seed: int) -> str:
    """Return the name of the folder of an arm with a seed."""
    return f"{arm}--seed-{seed}"


def run_tree(study: Study, arm: Arm, seed: int, *, out: Path, models: Path) -> dict[str, Any]:
    """Return the tables of one run: the study's base, what the arm changes, and a place."""
    tree = placed(dict(study.base), seed=seed, folder=models)
    for key, value in arm.changes.items():
        set_key(tree, key, placed(value, seed=seed, folder=models))
    tree["seed"] = seed
    set_key(tree, "run.name", run_name(arm.name, seed))
    set_key(tree, "run.folder", str(out / RUNS))
    return tree
