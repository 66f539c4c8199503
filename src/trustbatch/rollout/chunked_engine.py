"""An engine that is called with a few prompts at a time."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import Completion, GenerationRequest
from trustbatch.utils.chunks import chunks_of


class ChunkedEngine:
    """Divides requests as an `EnginePool` does, so that both round in the same way.

    What is computed together decides about the last bits of log-probs: with the same parts, one
    engine and many sample the same, bit for bit.
    """

    def __init__(self, engine: RolloutEngine, *, prompts_per_call: int) -> None:
        self.engine = engine
        self.prompts_per_call = prompts_per_call

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        return self.engine.version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all samples of all requests, one part after the other."""
        return [
            completion
            for part in chunks_of(requests, self.prompts_per_call)
            for completion in self.engine.generate(part)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pass new parameters on."""
        self.engine.load_weights(weights, version)

    def sleep(self) -> None:
        """Let the engine give back its memory."""
        self.engine.sleep()

    def wake(self) -> None:
        """Get the engine ready."""
        self.engine.wake()

    def close(self) -> None:
        """End the engine."""
        self.engine.close()
