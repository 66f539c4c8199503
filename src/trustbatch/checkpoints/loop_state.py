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
    """tokens sampled since this start of the run; not saved"""
    pending: deque[list[RolloutGroup]] = field(default_factory=deque)
    """graded batches that were not yet trained on, oldest first"""
    sampling_metrics: deque[dict[str, float]] = field(default_factory=deque)
    """how the sampling of each pending batch went"""
    spare: list[RolloutGroup] = field(default_factory=list)
    """graded groups that dynamic sampling sampled beyond the need of a batch, for the next one"""
    task: dict[str, Any] = field(default_factory=dict)
    """what the task has learnt on the way; plain values, as in JSON"""

    def take_batch(self) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Remove the oldest pending batch; returns it, and how its sampling went."""
        return self.pending.popleft(), self.sampling_metrics.popleft()
