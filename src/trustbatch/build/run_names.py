"""The name of a run that was given none: a new one for each configuration, and never another's."""

import itertools
import re
from pathlib import Path

from trustbatch.build.arguments import Arguments
from trustbatch.build.fingerprints import fingerprint_code, refuse_changed_files
from trustbatch.checkpoints.load import list_checkpoints
from trustbatch.config import Config
from trustbatch.config.resume import check_resumable
from trustbatch.errors import ConfigError
from trustbatch.observe.run_folder import RunFolder
from trustbatch.tasks.data_files import ENDINGS


def named_config(arguments: Arguments) -> Config:
    """Return the configuration with the name that was given, or else with a new one.

    Without a name, the same arguments go on with the run that they have begun.
    """
    config = arguments.config()
    if "name" in arguments.tree.get("run", {}):
        return config
    base = _base(config, arguments)
    for number in itertools.count(1):
        config = arguments.config(base if number == 1 else f"{base}-{number}")
        if _can_go_on(config, arguments):
            return config
    raise AssertionError("there is always another number")


def _base(config: Config, arguments: Arguments) -> str:
    """Return a name such as p3o-arithmetic."""
    options = config.task.options
    task = config.task.name.rpartition(":")[2]
    if arguments.task is not None:
        task = arguments.task.name
    elif arguments.rows is not None:
        task = "data"
    elif task == "file":
        task = Path(str(options["path"])).name.rpartition(":")[2]
        for ending in sorted(ENDINGS, key=len, reverse=True):
            task = task.removesuffix(ending)
    words = f"{config.objective.name.rpartition(':')[2].rpartition('.')[2]}-{task}"
    return re.sub(r"[^\w.-]+", "-", words).strip("-.") or "run"


def _can_go_on(config: Config, arguments: Arguments) -> bool:
    """Whether the run folder is empty, or has a run of this configuration and this code."""
    run = RunFolder(config.run, config.to_toml())
    if not run.has_results:
        return True
    newest = next(reversed(list_checkpoints(run.checkpoints)), None)
    try:
        check_resumable(config, run)
        refuse_changed_files(config, newest, fingerprint_code(config, arguments.task), _silent)
    except ConfigError:
        return False
    return True


def _silent(_: str) -> None:
    """An accepted edit is announced when the run starts."""
