"""Whether a run folder belongs to a configuration: a run may be resumed with few changes."""

import re
from collections.abc import Iterable
from pathlib import Path

from trustbatch.checkpoints.load import CONFIG_FILE, list_checkpoints
from trustbatch.config.loading import load_config
from trustbatch.config.tree import Config
from trustbatch.errors import ConfigError
from trustbatch.observe.run_folder import RunFolder
from trustbatch.utils.tables import flatten

STEPS = "training.steps"
LEFT_OUT = re.compile(r"task(\.parts\.\d+)?\.leave_out")
"""rows whose places others take, so that all other prompts stay what they are"""
MICRO_BATCHING_KEYS = ("training.micro_batch_tokens", "training.share_prompts")
"""keys that may change too, unless the objective measures its trust per micro-batch"""


def check_resumable(config: Config, run: RunFolder) -> None:
    """Refuse a run folder with results of another configuration."""
    if not run.has_results:
        return
    # a checkpoint has its own copy, where the folder's was removed
    copies = [checkpoint / CONFIG_FILE for checkpoint in list_checkpoints(run.checkpoints)[::-1]]
    found = [path for path in (run.path / "config.toml", *copies) if path.is_file()]
    if found:
        _refuse_changes(config, found[0], f"{run.path} holds a run with another configuration")


def check_checkpoint(config: Config, checkpoint: Path) -> None:
    """Refuse a checkpoint that another configuration wrote, whoever put it into the run folder."""
    file = checkpoint / CONFIG_FILE
    if file.is_file():
        _refuse_changes(config, file, f"{checkpoint} belongs to a run with another configuration")


def _refuse_changes(config: Config, file: Path, what: str) -> None:
    """Raise an error that starts with `what` if a stored configuration may not become this one."""
    # parsed, so that a key this version has added counts as its default
    try:
        before = flatten(load_config(file).to_dict())
    except ConfigError as error:
        raise ConfigError(f"{file} can't be read, so the run can't go on: {error}") from error
    now = flatten(config.to_dict())
    may_change = [*Config.changeable_keys()]
    if config.objective.options.get("ess_scope") != "micro_batch":
        may_change += MICRO_BATCHING_KEYS
    if now[STEPS] > before[STEPS]:
        may_change.append(STEPS)  # the run is extended
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key)
        and not _is_below(key, may_change)
        and not LEFT_OUT.fullmatch(key)
    )
    if changed:
        key = changed[0]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ConfigError(
            f"{what} ({key} was "
            f"{before.get(key, 'not set')}, now {now.get(key, 'not set')}{more}): choose "
            "another name or folder for this run, or delete that one."
        )


def _is_below(key: str, others: Iterable[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)
