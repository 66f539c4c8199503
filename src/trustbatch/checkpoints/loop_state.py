"""How far a run is: what a checkpoint must hold beside the trainer's state."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from trustbatch.types import RolloutBatch, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where generation stands in the task; a complete batch comes with the next cursor."""

    num_prompts: int = 0
    """prompts taken from the task so far"""
    spare: tuple[RolloutGroup, ...] = ()
    """graded groups that dynamic sampling left over from a batch, for the next one"""
    task_state: dict[str, Any] = field(default_factory=dict)
    """what a learning task has observed so far; plain values, as in JSON"""


@dataclass(kw_only=True)
class LoopState:
    """Changes with every step, and is saved as a whole."""

    step: int = 0
    """steps trained so far, which is also the policy's version"""
    cursor: Cursor = field(default_factory=Cursor)
    """where the generation of the next batch starts"""
    pending: deque[RolloutBatch] = field(default_factory=deque)
    """graded batches that were not trained on yet, oldest first"""
