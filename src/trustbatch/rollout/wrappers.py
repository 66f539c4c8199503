"""Engines around engines: a few prompts per call, and one engine for all ranks."""

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import Completion, GenerationRequest
from trustbatch.utils.chunks import chunks_of
from trustbatch.utils.distributed import all_gather, this_rank


class ChunkedEngine:
    """Calls an engine with a few prompts at a time, as an engine pool does.

    The last bits of log-probs depend on what is in one batch: with the same chunks, one engine and
    many return the same completions, bit for bit.
    """

    def __init__(self, engine: RolloutEngine, *, prompts_per_call: int) -> None:
        self.engine = engine
        self.prompts_per_call = prompts_per_call

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        return self.engine.version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all completions, one chunk of requests after the other."""
        return [
            completion
            for part in chunks_of(requests, self.prompts_per_call)
            for completion in self.engine.generate(part)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pass new parameters on."""
        self.engine.load_weights(weights, version)

    def sleep(self) -> None:
        """Let the engine free its memory."""
        self.engine.sleep()

    def wake(self) -> None:
        """Get the engine ready."""
        self.engine.wake()

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


class SharedEngine:
    """One engine for all ranks: distributes requests to the first `num_owners` ranks.

    These have an engine each, and completions do not depend on the engine that samples them, so the
    result is the same for any number of ranks. All ranks call every method, in the same order.
    """

    def __init__(self, own: RolloutEngine | None, *, num_owners: int, version: int) -> None:
        self.own = own
        self.num_owners = num_owners
        self._version = version

    @property
    def version(self) -> int:
        """Version of the weights that the next completions are sampled from."""
        return self._version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample this rank's share; return the completions of all requests, in order."""
        own: list[Completion] = []
        if self.own is not None:
            share = requests[this_rank() :: self.num_owners]
            own = self.own.generate(share) if share else []
        by_owner = [deque(part) for part in all_gather(own)]
        return [
            by_owner[number % self.num_owners].popleft()
            for number, request in enumerate(requests)
            for _ in range(request.num_samples)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pass new parameters on; a rank without an engine takes part in gathering them."""
        if self.own is not None:
            self.own.load_weights(weights, version)
        else:
            for _ in weights:
                pass
        self._version = version

    def sleep(self) -> None:
        """Let this rank's engine free its memory."""
        if self.own is not None:
            self.own.sleep()

    def wake(self) -> None:
        """Get this rank's engine ready."""
        if self.own is not None:
            self.own.wake()

    def close(self) -> None:
        """End this rank's engine."""
        if self.own is not None:
            self.own.close()
