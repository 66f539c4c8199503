"""[run]: where results go."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from trustbatch.utils.tables import Changeable, Table

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class RunConfig(Table):
    """[run]: where results go. Nothing here changes what is computed."""

    name: Changeable[str] = Field(default="run", pattern=r"^[^/\\]*[^/\\.][^/\\]*$")
    """a plain name, which becomes the folder's"""
    folder: Changeable[str] = "runs"
    checkpoint_every: Changeable[int] = Field(default=50, ge=1)
    """steps between checkpoints; the last step always has one"""
    keep_checkpoints: Changeable[int] = Field(default=2, ge=0)
    """newest checkpoints kept; 0: none is written, and the run can't be continued"""
    rollouts_every: Changeable[int] = Field(default=10, ge=1)
    """steps between samples of completions in rollouts/; the first and the last step have one"""
    rollouts_logged: Changeable[int] = Field(default=16, ge=0)
    """completions in each sample; the last prompt's are all in it"""
    tokens_logged: Changeable[int] = Field(default=16_384, ge=0)
    """tokens of each sample that are recorded one by one; longer completions as text only"""
    rollouts_megabytes: Changeable[int] = Field(default=256, ge=1)
    """size of rollouts/: beyond it, every second file is deleted"""
    ledger_every: Changeable[int] = Field(default=25, ge=0)
    """steps between ledgers, which take a forward pass where several updates share a batch, and
    one more where rollouts lag; the first step has one; 0: none"""

    trackers: Changeable[tuple[TrackerName, ...]] = ("tensorboard",)
    """where metrics and completions are sent, beside the files of the run folder"""

    accept_changes: Changeable[tuple[Fingerprint, ...]] = ()
    """fingerprints of edited files with which the run may be resumed"""

    @field_validator("trackers")
    @classmethod
    def _refuse_duplicates(cls, names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice: name each tracker once.")
        return names

    def logs_rollouts(self, step: int, num_steps: int) -> bool:
        """Whether the completions of a step are written to rollouts/."""
        is_due = step % self.rollouts_every == 0 or step in (1, num_steps)
        return bool(self.rollouts_logged) and is_due

    def saves_checkpoint(self, step: int, *, is_last: bool) -> bool:
        """Whether a checkpoint follows a step, which may be the last of this start."""
        return bool(self.keep_checkpoints) and (is_last or step % self.checkpoint_every == 0)

    def has_ledger(self, step: int) -> bool:
        """Whether the metrics of a step include the ledger; not the last's, which may change."""
        return bool(self.ledger_every) and (step == 1 or step % self.ledger_every == 0)

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.folder) / self.name
