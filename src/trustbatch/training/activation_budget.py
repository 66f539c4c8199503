"""How many forward passes may keep their activations until their backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trustbatch.models.policy import Policy
from trustbatch.utils.cuda_memory import free_memory
from trustbatch.utils.distributed import num_ranks

FREE_MEMORY_FRACTION = 0.3
"""of the free memory that held activations may take: a backward pass needs memory too"""


class ActivationBudget:
    """Compares the activations of forward passes on a GPU with its free memory.

    On a CPU, where memory can't be measured, one pass is held; likewise with several ranks, which
    must all decide the same, and where activations are offloaded: they take host memory then.
    """

    def __init__(self, policy: Policy, *, offloads: bool) -> None:
        self.device = policy.device
        self.is_measured = self.device.type == "cuda" and num_ranks() == 1 and not offloads
        self.largest = 0
        self.left = 0.0
        if self.is_measured:
            gradients = sum(p.nbytes for p in policy.model.parameters() if p.requires_grad)
            self.left = FREE_MEMORY_FRACTION * (free_memory(self.device) - gradients)

    def has_room(self) -> bool:
        """Whether the activations of one more pass may be held."""
        return self.is_measured and self.largest <= self.left

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the activations of the forward pass inside the context."""
        before = self._allocated()
        yield
        size = self._allocated() - before
        self.largest = max(self.largest, size)
        self.left -= size

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_measured else 0
