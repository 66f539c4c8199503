"""Which configuration may continue the run in a folder."""

from collections.abc import Mapping
from typing import Any

from trustbatch.config import Config, load_config
from trustbatch.errors import ConfigError
from trustbatch.observe.run_folder import read_metrics

MAY_CHANGE = (
    "run.",
    "rollout.max_sequences",
    "rollout.prompts_per_call",
    "rollout.canary_every",
    "rollout.vllm.start_seconds",
    "rollout.vllm.generate_seconds",
    "rollout.vllm.update_seconds",
    "rollout.vllm.transfer_folder",
    "cluster.engines",
    "cluster.trainers",
    "cluster.reward_workers",
    "cluster.address",
    "cluster.engine_gpus",
    "cluster.weight_transfer",
    "cluster.transfer_folder",
    "cluster.max_restarts",
    "cluster.start_seconds",
    "cluster.generate_seconds",
    "cluster.grade_seconds",
    "cluster.train_seconds",
    "cluster.transfer_seconds",
    "reward.workers",
    "reward.time_limit",
    "reward.memory_limit_gib",
    "training.gradient_checkpointing",
    "training.compile",
    "training.cpu_offload",
    "evaluation.",
)
"""prefixes of keys that a resumed run may change: they do not change what is computed"""
DIVISION_OF_WORK = ("training.micro_batch_tokens", "training.share_prompts")
"""likewise, unless the objective measures the effective sample size per micro-batch"""


def refuse_changed_config(config: Config) -> None:
    """Refuse a configuration other than that of the run which the run folder holds."""
    folder = config.run.path
    file = folder / "config.toml"
    # a failed start left no results, so its configuration does not matter
    has_steps = any(line["step"] > 0 for line in read_metrics(folder))
    has_results = has_steps or any((folder / "checkpoints").glob("step-*"))
    if not file.is_file() or not has_results:
        return
    # parsed, so that a key which this version has added counts as its default
    try:
        before = _flatten(load_config(file).to_dict())
    except ConfigError as error:
        raise ConfigError(f"{file} can't be read, so the run can't continue: {error}") from error
    now = _flatten(config.to_dict())
    may_change = MAY_CHANGE
    if config.objective.options.get("ess_scope") != "micro_batch":
        may_change += DIVISION_OF_WORK
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and not key.startswith(may_change)
    )
    if changed:
        key = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ConfigError(
            f"{folder} holds a run with another configuration ({key} was "
            f"{before.get(key, 'not set')}, now {now.get(key, 'not set')}{more}): choose "
            "another name or folder for this run, or delete that one."
        )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
