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
    keep_checkpoints: Changeable[int] = Field(default=2, ge=1)
    rollouts_every: Changeable[int] = Field(default=10, ge=1)
    """steps between samples of completions in rollouts/"""
    rollouts_logged: Changeable[int] = Field(default=16, ge=0)
    """completions in each sample"""

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

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.folder) / self.name
