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


def count_without_gradient(session: Session, sequences: Sequence[TrainSequence]) -> int:
    """Take a step; returns how many of its forward passes were without gradient."""
    root, count = session.policy.root, 0

    def note(*_: Any) -> None:
        nonlocal count
        count += not torch.is_grad_enabled()

    hook = root.register_forward_pre_hook(note)
    session.trainer.train(sequences)
    hook.remove()
    return count
