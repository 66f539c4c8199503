"""Evaluating one model on a suite, into a folder of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trustbatch.build.engines import build_engine
from trustbatch.build.policies import load_model
from trustbatch.errors import ConfigError
from trustbatch.evaluation.run import ModelEvaluator
from trustbatch.evaluation.settings import Evaluation, SamplingSettings
from trustbatch.evaluation.suite import EvaluatedTask, TaskChoice, load_suite
from trustbatch.studies.job import Job


def evaluate_on_suite(job: Job) -> None:
    """Sample and grade what the folder does not have yet, and write results.json."""
    details = job.details
    if details["is_checkpoint"] and not Path(details["model"]).is_dir():
        raise ConfigError(f"{details['model']} is not there: finish the study that trains it.")
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
