"""What became of one problem: how many of its samples are right, wrong, cut off or ungraded."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trustbatch.types import FinishReason, GradeStatus

RIGHT = 1.0
"""a sample with this reward or more is right"""


@dataclass(frozen=True, kw_only=True)
class ProblemOutcome:
    """The counts that every score is made of.

    A sample that could not be graded is neither right nor wrong: it is no part of `graded`, and
    the problem has that many samples fewer.
    """

    id: str
    samples: int
    graded: int
    correct: int
    truncated: int
    """samples that were cut off at max_tokens"""
    mean_reward: float | None
    """over graded samples"""
    mean_tokens: float

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "ProblemOutcome":
        """Count the samples of one line of samples.jsonl."""
        samples = record["samples"]
        rewards = [s["reward"] for s in samples if s["status"] == GradeStatus.GRADED]
        return cls(
            id=record["id"],
            samples=len(samples),
            graded=len(rewards),
            correct=sum(reward >= RIGHT for reward in rewards),
            truncated=sum(s["finish_reason"] == FinishReason.LENGTH for s in samples),
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
            mean_tokens=sum(s["tokens"] for s in samples) / len(samples),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as in JSON."""
        return asdict(self)
