"""What decides which samples an evaluation samples."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trustbatch.tasks.answering import answers
from trustbatch.types import SamplingParams

if TYPE_CHECKING:
    from trustbatch.evaluation.suite import EvaluatedTask
    from trustbatch.models.policy import Policy
    from trustbatch.rollout.config import RolloutConfig


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
    *,
    max_sequences: int,
) -> dict[str, Any]:
    """Return what is kept beside results, as plain values.

    `max_sequences` decides which problems are sampled together, and so how their logits are
    rounded.
    """
    is_auto = rollout.precision == "auto"
    template = policy.tokenizer.chat_template
    return {
        **asdict(sampling),
        "tasks": {
            task.name: {"problems": len(task.problems), "digest": task.digest} for task in suite
        },
        # no other task has a second turn
        "max_turns": rollout.max_turns if any(answers(each.task) for each in suite) else None,
        "chat_template": None if not template else digest(str(template)),
        "engine": rollout.engine,
        "precision": policy.precision if is_auto else rollout.precision,
        "max_sequences": max_sequences,
    }


def digest(*texts: str) -> str:
    """Return a short name of some texts that no others have."""
    found = hashlib.blake2b(digest_size=8)
    for text in texts:
        written = text.encode(errors="surrogatepass")
        found.update(len(written).to_bytes(8, "little") + written)
    return found.hexdigest()
