"""What decides which samples an evaluation draws."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trustbatch.types import SamplingParams

if TYPE_CHECKING:
    from trustbatch.config import RolloutConfig
    from trustbatch.evaluation.suite import EvaluatedTask
    from trustbatch.policy import Policy


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How many samples of each problem, and how; defaults are the paper's."""

    samples: int = 16
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 4096
    seed: int = 0

    def params(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """Return what an engine is asked for."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop_token_ids=stop_token_ids,
            temperature=self.temperature,
            top_p=self.top_p,
        )


def recorded_settings(
    sampling: SamplingSettings,
    suite: "Sequence[EvaluatedTask]",
    rollout: "RolloutConfig",
    policy: "Policy",
) -> dict[str, Any]:
    """Return what is kept beside results, as plain values."""
    is_auto = rollout.precision == "auto"
    return {
        **asdict(sampling),
        "tasks": {
            task.name: {"problems": len(task.problems), "digest": task.digest} for task in suite
        },
        "engine": rollout.engine,
        "precision": policy.precision if is_auto else rollout.precision,
    }


def digest(*texts: str) -> str:
    """Return a short name of some texts that no others have."""
    found = hashlib.blake2b(digest_size=8)
    for text in texts:
        written = text.encode(errors="surrogatepass")
        found.update(len(written).to_bytes(8, "little") + written)
    return found.hexdigest()
