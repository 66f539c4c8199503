"""Weights & Biases: online where there is a login, otherwise offline in the run folder."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from trustbatch.observe.status import RunState
from trustbatch.observe.trackers.base import COLUMNS, PROJECT, Memory, Row, TrackedRun

UPLOAD_SECONDS = 20.0
"""at the end of a run; what is left is on the disk, for `wandb sync`"""
CONNECT_SECONDS = 20.0
FLUSH_SECONDS = 0.1
"""between writes to the disk: what is lost when a run is killed"""


class WeightsAndBiases:
    """A run of wandb. A resumed run has the same id."""

    packages: ClassVar[tuple[str, ...]] = ("wandb",)
    takes_id: ClassVar[bool] = True

    def start(self, run: TrackedRun, memory: Memory) -> None:
        """Open or resume the run, without anything that wandb would collect by itself."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = import_module("wandb")
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=memory.id,
            resume="allow",
            dir=run.folder,
            mode=_mode(wandb),
            config=dict(run.config),
            allow_val_change=True,
            # another run of this process may be open
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                finish_timeout=UPLOAD_SECONDS,
                finish_timeout_raises=True,
                init_timeout=CONNECT_SECONDS,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH_SECONDS,
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics and close the step: what is open is lost when the run is killed."""
        self._run.log(dict(metrics), step=step, commit=True)

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Log a table, whose strings are shown as they are; the step stays open."""
        table = self._table(
            columns=list(COLUMNS), data=[*rows], allow_mixed_types=True, log_mode="IMMUTABLE"
        )
        self._run.log({"completions": table}, step=step, commit=False)

    def finish(self, state: RunState, evaluation: Mapping[str, float]) -> None:
        """Put the last evaluation into the summary, and end the run."""
        self._run.summary.update(dict(evaluation))
        self._run.finish(exit_code=0 if state in ("finished", "stopped") else 1)


def _mode(wandb: Any) -> str:
    """Return the user's mode, or offline where nobody has logged in: wandb would ask for a key."""
    from requests.utils import get_netrc_auth

    settings = wandb.setup().settings
    has_login = bool(
        settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url)
    )
    if settings.mode != "online" or has_login:
        return settings.mode
    if "WANDB_MODE" in os.environ:
        raise RuntimeError("WANDB_MODE is online and there is no login: run wandb login")
    return "offline"
