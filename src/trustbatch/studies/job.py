"""What a worker does in one go: a run, or the evaluation of what was trained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trustbatch.observe.run_folder import read_metrics
from trustbatch.studies.folder import EVALUATION_FILE, FAILURE_FILE

Kind = Literal["make_model", "train", "benchmark"]
Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Plain values only: it travels to another process as JSON."""

    kind: Kind
    name: str
    folder: str
    """where its results, or its failure, go"""
    details: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """folders of models that must be there first"""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def is_compared(self) -> bool:
        """Whether it is a part of the study, and not made for one."""
        return self.kind != "make_model"

    @property
    def has_failed(self) -> bool:
        """Whether an earlier try left a failure."""
        return (self.path / FAILURE_FILE).is_file()

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to do; what has failed, even at its very end, is not."""
        if self.has_failed:
            return False
        if self.kind == "make_model":
            return self.path.is_dir()
        if self.kind == "benchmark":
            return (self.path / "results.json").is_file()
        if self.details["held_out"] is not None:
            return self.is_trained and (self.path / EVALUATION_FILE).is_file()
        return self.is_trained

    @property
    def is_trained(self) -> bool:
        """Whether its last step is among its metrics, and what it trained has been written."""
        steps = self.details["steps"]
        metrics = read_metrics(self.path)
        is_over = bool(metrics) and metrics[-1]["step"] == steps
        return is_over and (self.path / "checkpoints" / f"step-{steps}").is_dir()
