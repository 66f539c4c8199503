"""What train_gpu.py trains on, and what a step of it computes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trustbatch.build.session import Session
from trustbatch.types import TrainSequence

MISMATCH = 0.02
"""standard deviation of the noise in log-probs: 1 - ESS is its square"""


def nearly_on_policy(
    session: Session, sequences: Sequence[TrainSequence], *, seed: int
) -> list[TrainSequence]:
    """Return the sequences as if the policy itself had sampled them, in lower precision."""
    generator = torch.Generator().manual_seed(seed)
    logp = session.trainer.logprobs(sequences)
    return [
        replace(
            sequence,
            completion=replace(
                sequence.completion,
                behavior_logp=own + MISMATCH * torch.randn(len(own), generator=generator),
            ),
        )
        for sequence in sequences
        for own in [logp[sequence.completion.key]]
    ]


class PassesWithoutGradient:
    """Counts the forward passes without gradient, inside its context."""

    def __init__(self, session: Session) -> None:
        self.number = 0
        self._root = session.policy.root

    def __enter__(self) -> "PassesWithoutGradient":
        self._hook = self._root.register_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()

    def _note(self, *_: Any) -> None:
        self.number += not torch.is_grad_enabled()
