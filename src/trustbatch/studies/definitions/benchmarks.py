"""How do trained policies do on problems that nobody trained on?"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.observe.config import RunConfig
from trustbatch.studies.folder import STUDY_FILE, StudyFolder, arm_of
from trustbatch.studies.job import Job
from trustbatch.studies.planned_jobs import model_jobs
from trustbatch.studies.resolve import RUNS, run_name, run_tree
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Arm, Study
from trustbatch.studies.tiny_models import tiny_models_in

NAME = "benchmarks"
BASE_MODEL = "base"
EVALUATIONS = "evaluations"


def benchmarks(scale: Scale, source: Path) -> Study:
    """The checkpoints of another study and the model they came from, on held-out benchmarks."""
    before = StudyFolder(source).read()
    if before is None:
        raise ConfigError(f"{source} has no {STUDY_FILE}: name the folder of a study with --from.")
    if before["scale"] != scale.name:
        raise ConfigError(
            f"{source} has a study of the {before['scale']} scale: set --scale {before['scale']}."
        )
    base = Arm(name=BASE_MODEL, label="Base model", changes={})
    arms = [arm_of(tree) for tree in before["arms"]]
    earlier = _earlier_checkpoints(before["base"])
    return Study(
        name=NAME,
        scale=scale.name,
        title=f"Benchmarks of {before['title'].lower()}",
        question="Does what was learned hold on problems that nobody trained on?",
        base=before["base"],
        arms=(base, *(each for arm in arms for each in (*_earlier_arms(arm, earlier), arm))),
        seeds=tuple(before["seeds"]),
        subject=before["subject"],
        paper_columns=_paper_columns(before, earlier),
    )


def _earlier_checkpoints(base: Mapping[str, Any]) -> list[int]:
    """Return the steps of the checkpoints that a run keeps beside its last one."""
    run, steps = RunConfig.model_validate(base.get("run", {})), base["training"]["steps"]
    before_last = range(run.checkpoint_every, steps, run.checkpoint_every)
    return list(before_last)[max(len(before_last) - run.keep_checkpoints + 1, 0) :]


def _earlier_arms(arm: Arm, steps: list[int]) -> list[Arm]:
    """Return what an arm had become by then: the same configuration, with fewer steps."""
    return [
        replace(
            arm,
            name=f"{arm.name}{_suffix(step)}",
            label=f"Step {step}: {arm.label}",  # that of the regime stays at the end
            changes={**arm.changes, "training.steps": step},
            family=f"{arm.family}{_suffix(step)}" if arm.family else "",
        )
        for step in steps
    ]


def _suffix(step: int) -> str:
    return f"-iter{step}"


def _paper_columns(before: Mapping[str, Any], earlier: list[int]) -> dict[str, str]:
    columns = {key: arm for key, arm in before["paper_columns"].items() if key != "grpo_std"}
    if before["name"] != "fp8":
        return {"baseline_4k": BASE_MODEL, **columns}
    last = before["base"]["training"]["steps"]
    return {
        "baseline_16k": BASE_MODEL,
        **{
            f"fp8_{key}_iter{step}": f"{arm}{'' if step == last else _suffix(step)}"
            for key, arm in columns.items()
            for step in (*earlier, last)
        },
    }


def benchmark_jobs(
    study: Study, scale: Scale, *, source: Path, out: Path, models: Path, data: str | None
) -> list[Job]:
    """Return an evaluation of the base model and of every finished run, seed by seed."""
    jobs = []
    for seed in study.seeds:
        for arm in study.arms:
            tree = run_tree(study, arm, seed, out=source, models=models)
            config = parse_config(tree)
            name = run_name(arm.name, seed)
            steps = config.training.steps
            run = source / RUNS / run_name(arm.name.removesuffix(_suffix(steps)), seed)
            checkpoint = run / "checkpoints" / f"step-{steps}"
            # what was trained with long completions is not cut short: the paper's 16K family
            max_tokens = max(scale.suite.max_tokens, config.rollout.max_tokens)
            is_base = arm.name == BASE_MODEL
            jobs.append(
                Job(
                    kind="benchmark",
                    name=name,
                    folder=str(out / EVALUATIONS / name),
                    details={
                        "model": tree["model"]["name"] if is_base else str(checkpoint),
                        "is_checkpoint": not is_base,
                        "tables": {
                            key: value for key, value in tree["model"].items() if key != "name"
                        },
                        "label": name,
                        "suite": asdict(replace(scale.suite, max_tokens=max_tokens)),
                        "data": data,
                        "seed": seed,
                    },
                    needs=tuple(str(path) for path in tiny_models_in(tree["model"]) if is_base),
                )
            )
    return [*model_jobs(jobs), *jobs]
