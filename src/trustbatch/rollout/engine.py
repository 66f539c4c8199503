"""What the rest of the package needs of a rollout engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trustbatch.types import Completion, GenerationRequest


class RolloutEngine(Protocol):
    """Samples completions, and says from which version of the policy it sampled them."""

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all samples of all requests: in the order of the requests, then of the samples."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the policy's parameters as the given version."""
        ...

    def sleep(self) -> None:
        """Give back the memory that is needed for generating only; `wake` takes it again."""
        ...

    def wake(self) -> None:
        """Get ready to generate after `sleep`; the weights are those of `version`."""
        ...

    def close(self) -> None:
        """End for good, with every process and file that belongs to the engine."""
        ...


@dataclass(frozen=True)
class Engines:
    """What samples the completions of a run."""

    trained: RolloutEngine
    """the trained policy alone"""
    all: RolloutEngine
    """with second policies; closing it closes everything"""
