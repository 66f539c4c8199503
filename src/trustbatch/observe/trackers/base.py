"""What all trackers have in common: what they are told, what they remember, how text is cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from trustbatch.observe.status import RunState

PROJECT = "trustbatch"
"""of wandb and trackio, and MLflow's experiment; each has a variable that names another"""
COLUMNS = (
    "step",
    "prompt_id",
    "sample",
    "prompt",
    "completion",
    "answer",
    "reward",
    "advantage",
    "finish_reason",
    "tokens",
    "version",
)
"""of the table of completions"""
MAX_ROWS = 64
MAX_CHARACTERS = 4000
"""of a text in the table"""

Row = list[Any]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run at its start."""

    name: str
    folder: Path
    toml: str
    """the whole configuration"""
    config: Mapping[str, Any]
    """the same, parsed"""
    step: int
    """trained so far: later steps that a killed run has sent are trained again"""


@dataclass(kw_only=True)
class Memory:
    """What a tracker must know of a run's earlier starts; kept in the run folder if it has an id"""

    id: str = ""
    """of the run, for the tracker"""
    last_step: int = -1
    """that the tracker has"""


class Tracker(Protocol):
    """Somewhere that metrics are sent to. All calls come from one thread, and may fail or hang."""

    packages: ClassVar[tuple[str, ...]]
    """that must be importable; the extra of the tracker's name has them"""
    takes_id: ClassVar[bool]
    """whether it takes any id for a run: one is made, and remembered, before the start"""

    def start(self, run: TrackedRun, memory: Memory) -> None:
        """Open the run, or continue it if `memory` knows it; completes `memory`."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step; steps come in order, each once."""
        ...

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Send a table with the columns `COLUMNS`, before the metrics of its step."""
        ...

    def finish(self, state: RunState, evaluation: Mapping[str, float]) -> None:
        """Send how the run ended and what its last evaluation said, and close."""
        ...


def table_rows(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of a table of completions, from what rollouts/ holds of them."""
    return [[_bounded(record.get(name)) for name in COLUMNS] for record in records[:MAX_ROWS]]


def _bounded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # what is not Unicode, such as half a surrogate pair in a data file, can't be stored
    text = value.encode(errors="replace").decode()
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]} [{left_out:,} characters more]"
