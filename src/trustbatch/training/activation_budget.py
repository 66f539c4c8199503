"""How many forward passes can wait for their backward pass at the same time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trustbatch.models.policy import Policy
from trustbatch.utils.distributed import num_ranks

FREE_MEMORY_FRACTION = 0.3
"""part of the free memory that waiting graphs may take: a backward pass needs room of its own"""


class ActivationBudget:
    """Measures the graphs of forward passes on a GPU against its free memory.

    Elsewhere there is room for one, since memory can't be measured; and for one where several ranks
    train together, since all must decide alike.
    """

    def __init__(self, policy: Policy) -> None:
        self.device = policy.device
        self.is_measured = self.device.type == "cuda" and num_ranks() == 1
        self.largest = 0
        self.left = 0.0
        if self.is_measured:
            gradients = sum(p.nbytes for p in policy.model.parameters() if p.requires_grad)
            self.left = FREE_MEMORY_FRACTION * (self._free() - gradients)

    def has_one_more(self) -> bool:
        """Whether the next pass may be held beside those that wait."""
        return self.is_measured and self.largest <= self.left

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Run a forward pass whose graph will wait."""
        before = self._allocated()
        yield
        size = self._allocated() - before
        self.largest = max(self.largest, size)
        self.left -= size

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_measured else 0

    def _free(self) -> int:
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused
