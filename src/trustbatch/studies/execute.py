"""How a worker executes each kind of job."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trustbatch.api import train_config, train_session
from trustbatch.build.engines import build_engine
from trustbatch.build.policies import load_model
from trustbatch.build.session import build_session
from trustbatch.checkpoints.load import TRAINER_FOLDER
from trustbatch.checkpoints.manifest import MANIFEST_FILE, write_manifest
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError, DivergedError
from trustbatch.evaluation import EvaluationResult, evaluate
from trustbatch.evaluation.run import ModelEvaluator
from trustbatch.evaluation.settings import Evaluation, SamplingSettings
from trustbatch.evaluation.suite import EvaluatedTask, TaskChoice, load_suite
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import describe_environment, read_metrics
from trustbatch.studies.folder import EVALUATION_FILE
from trustbatch.studies.jobs import Job, Outcome
from trustbatch.studies.records import (
    append_record,
    portable_evaluation,
    portable_tree,
    step_numbers,
)
from trustbatch.studies.tiny_models import make_tiny_model
from trustbatch.tasks import build_task
from trustbatch.utils.files import write_atomically
from trustbatch.utils.terminal import LiveLine


def execute(job: Job, *, is_asked_to_stop: Callable[[], bool]) -> Outcome:
    """Execute a job to its end, or until it is asked to stop."""
    if job.kind == "make_model":
        make_tiny_model(job.path, say=LiveLine().show)
        return "finished"
    if job.kind == "benchmark":
        evaluate_on_suite(job)
        return "finished"
    return train(job, is_asked_to_stop=is_asked_to_stop)


def train(job: Job, *, is_asked_to_stop: Callable[[], bool]) -> Outcome:
    """Train from the last checkpoint on, evaluate on held-out prompts, and keep the weights."""
    if job.record is not None:
        return train_and_record(job, job.record, is_asked_to_stop=is_asked_to_stop)
    if not job.is_trained:
        train_config(parse_config(job.details["tree"]), is_asked_to_stop=is_asked_to_stop)
    if not job.is_trained or (not job.is_done and is_asked_to_stop()):
        return "stopped"
    checkpoints = job.path / "checkpoints"
    if job.details["held_out"] is not None:
        evaluate_held_out(
            checkpoints / f"step-{job.details['steps']}",
            job.details["held_out"],
            model=job.details["tree"]["model"],
            file=job.path / EVALUATION_FILE,
        )
    for checkpoint in checkpoints.glob("step-*"):
        keep_weights_only(checkpoint)
    return "finished"


def train_and_record(
    job: Job, record: Mapping[str, Any], *, is_asked_to_stop: Callable[[], bool]
) -> Outcome:
    """Train from the start, evaluate on held-out prompts, and add a line to the records."""
    started, held_out = time.monotonic(), job.details["held_out"]
    config = parse_config(job.details["tree"])
    session = build_session(config)
    session.is_asked_to_stop = is_asked_to_stop
    found: dict[str, Any] = {}
    with contextlib.closing(session):
        if session.state.step > 0:
            raise ConfigError(
                f"{job.path} has checkpoints of a run without --records: choose another --out."
            )
        if record["before"]:
            found["held_out_before"] = mean_held_out(session.policy, held_out).mean_reward
        try:
            train_session(session)
            if session.state.step < config.training.steps:
                return "stopped"
            session.engine.sleep()
            result = mean_held_out(session.policy, held_out)
            found |= {
                "held_out": result.mean_reward,
                "standard_error": result.standard_error,
                "prompts": result.num_prompts,
                "samples": result.num_samples,
            }
        except DivergedError as error:
            # a failure of the objective, not of the machine: it counts as dead
            found |= {"held_out": 0.0, "failed": str(error)}
    regime, arm, seed = record["key"]
    environment = describe_environment()
    append_record(
        Path(record["file"]),
        {
            "name": job.name,
            "regime": regime,
            "arm": arm,
            "seed": seed,
            "config": portable_tree(job.details["tree"]),
            "evaluation": portable_evaluation(held_out),
            **found,
            "steps": step_numbers(read_metrics(job.path)),
            "seconds": round(time.monotonic() - started, 1),
            "commit": record["commit"] or environment["commit"],
            "environment": {key: environment[key] for key in ("started", "packages", "gpus")},
        },
    )
    return "finished"


def mean_held_out(policy: Policy, held_out: Mapping[str, Any]) -> EvaluationResult:
    """Return the mean reward of a policy on prompts that no run was trained on, at T = 1."""
    options = dict(held_out["task"])
    return evaluate(
        policy,
        build_task(options.pop("name"), **options),
        num_prompts=held_out["num_prompts"],
        num_samples=held_out["num_samples"],
        max_tokens=held_out["max_tokens"],
        say=LiveLine().show,
    )


def evaluate_held_out(
    checkpoint: Path, held_out: Mapping[str, Any], *, model: Mapping[str, Any], file: Path
) -> None:
    """Write mean reward and 95% interval over prompts that no run was trained on, at T = 1."""
    policy = Policy.load(
        str(checkpoint),
        device=model.get("device", "auto"),
        precision=model.get("precision", "auto"),
        trust_remote_code=model.get("trust_remote_code", False),
    )
    result = mean_held_out(policy, held_out)
    low, high = result.interval
    record = {
        **asdict(result),
        "low": low,
        "high": high,
        "temperature": 1.0,
        "task": dict(held_out["task"]),
    }
    write_atomically(file, json.dumps(record, indent=2) + "\n")


def keep_weights_only(checkpoint: Path) -> None:
    """Remove the trainer's state, three times as large as the model, from a checkpoint."""
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
    kept = {
        name: entry
        for name, entry in manifest["files"].items()
        if not name.startswith(f"{TRAINER_FOLDER}/")
    }
    write_manifest(checkpoint, kept)
    shutil.rmtree(checkpoint / TRAINER_FOLDER, ignore_errors=True)


def evaluate_on_suite(job: Job) -> None:
    """Generate and grade what the folder does not have yet, and write results.json."""
    details = job.details
    if details["is_checkpoint"] and not Path(details["model"]).is_dir():
        raise ConfigError(f"{details['model']} does not exist: finish the study that trains it.")
    suite = details["suite"]
    evaluator = ModelEvaluator(load_model=load_model, open_engine=build_engine)
    evaluator.evaluate_into(
        job.path,
        model=details["model"],
        name=details["label"],
        evaluation=Evaluation(
            suite=[_task(each, suite["num_endless"], details["data"]) for each in suite["tasks"]],
            sampling=SamplingSettings(
                samples=suite["samples"],
                temperature=suite["temperature"],
                top_p=suite["top_p"],
                max_tokens=suite["max_tokens"],
                seed=details["seed"],
            ),
            engine=suite["engine"],
            tables={"model": details["tables"]},
        ),
    )


def _task(table: Mapping[str, Any], num_endless: int, data: str | None) -> EvaluatedTask:
    options = {key: value for key, value in table.items() if key not in ("name", "label")}
    (found,) = load_suite([TaskChoice(table["name"], options)], data=data, num_endless=num_endless)
    return EvaluatedTask(table.get("label", found.name), found.task, found.problems)
