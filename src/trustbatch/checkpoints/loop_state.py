"""How far a loop is: what a checkpoint must hold beside the trainer's state."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from trustbatch.types import RolloutGroup


@dataclass(kw_only=True)
class LoopState:
    """Changes with every step, and is saved whole."""

    step: int = 0
    """steps trained so far, which is also the policy's version"""
    num_prompts: int = 0
    """prompts taken from the task so far"""
    num_tokens: int = 0
    """tokens drawn since this start of the run; not saved"""
    pending: deque[list[RolloutGroup]] = field(default_factory=deque)
    """graded batches that were not yet trained on, oldest first"""
    drawing: deque[dict[str, float]] = field(default_factory=deque)
    """how the drawing of each pending batch went"""
    spare: list[RolloutGroup] = field(default_factory=list)
    """graded groups that dynamic sampling drew beyond the need of a batch, for the next one"""
    task: dict[str, Any] = field(default_factory=dict)
    """what the task has learnt on the way; plain values, as in JSON"""

    def take_batch(self) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Remove the oldest pending batch; returns it, and how its drawing went."""
        return self.pending.popleft(), self.drawing.popleft()
