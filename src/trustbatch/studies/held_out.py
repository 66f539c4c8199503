"""The reward of a trained policy on prompts that no run was trained on."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trustbatch.evaluation import evaluate
from trustbatch.models.policy import Policy
from trustbatch.tasks import build_task
from trustbatch.utils.files import write_atomically
from trustbatch.utils.terminal import LiveLine

NORMAL_95 = 1.96


def evaluate_held_out(
    checkpoint: Path, held_out: Mapping[str, Any], *, model: Mapping[str, Any], file: Path
) -> None:
    """Sample and grade at temperature 1, and write mean and 95% interval over prompts."""
    options = dict(held_out["task"])
    policy = Policy.load(
        str(checkpoint),
        device=model.get("device", "auto"),
        precision=model.get("precision", "auto"),
        trust_remote_code=model.get("trust_remote_code", False),
    )
    result = evaluate(
        policy,
        build_task(options.pop("name"), **options),
        num_prompts=held_out["num_prompts"],
        num_samples=held_out["num_samples"],
        max_tokens=held_out["max_tokens"],
        say=LiveLine().show,
    )
    half = NORMAL_95 * result.standard_error
    record = {
        **asdict(result),
        "low": result.mean_reward - half,
        "high": result.mean_reward + half,
        "temperature": 1.0,
        "task": dict(held_out["task"]),
    }
    write_atomically(file, json.dumps(record, indent=2) + "\n")
