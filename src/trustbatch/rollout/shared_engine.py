"""One engine for all ranks: each samples its share of the completions, and all get all of them."""

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import Completion, GenerationRequest
from trustbatch.utils.distributed import all_gather, this_rank


class SharedEngine:
    """Deals requests to the first `num_owners` ranks, which have an engine of their own.

    What is sampled does not depend on who samples it, so the result is the same for any number of
    ranks. All ranks call every method, in the same order.
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
        """Sample this rank's share; return the completions of all requests, in their order."""
        sampled: list[Completion] = []
        if self.own is not None:
            share = requests[this_rank() :: self.num_owners]
            sampled = self.own.generate(share) if share else []
        by_owner = [deque(part) for part in all_gather(sampled)]
        return [
            by_owner[number % self.num_owners].popleft()
            for number, request in enumerate(requests)
            for _ in range(request.num_samples)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pass new parameters on; a rank without an engine helps to gather them."""
        if self.own is not None:
            self.own.load_weights(weights, version)
        else:
            for _ in weights:
                pass
        self._version = version

    def sleep(self) -> None:
        """Let this rank's engine give back its memory."""
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
