"""What train_gpu.py trains on, and what a step of it computes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from qwen3_shapes import SHAPES

from trustbatch.build.session import Session
from trustbatch.types import Completion, FinishReason, Provenance, TrainSequence

TOP_TOKENS = 16
MISMATCH = 0.02
"""standard deviation of the noise in log-probs: 1 - ESS is its square"""


def make_sequences(case: Any, *, seed: int) -> list[TrainSequence]:
    """Return sequences of random tokens, as if a uniform policy had sampled them."""
    vocabulary = SHAPES[case.shape].vocabulary
    generator = torch.Generator().manual_seed(seed)
    num_response = case.length - case.prompt_tokens
    uniform = -torch.tensor(float(vocabulary)).log()

    def random_tokens(*size: int) -> torch.Tensor:
        return torch.randint(2, vocabulary, size, generator=generator)

    prompts = [
        tuple(random_tokens(case.prompt_tokens).tolist())
        for _ in range(0, case.num_sequences, case.samples)
    ]
    return [
        TrainSequence(
            prompt_token_ids=prompts[number // case.samples],
            completion=Completion(
                prompt_id=str(number // case.samples),
                sample=number % case.samples,
                token_ids=random_tokens(num_response),
                behavior_logp=uniform.expand(num_response).clone(),
                top_token_ids=random_tokens(num_response, TOP_TOKENS),
                behavior_top_logp=uniform.expand(num_response, TOP_TOKENS).clone(),
                finish_reason=FinishReason.LENGTH,
                provenance=Provenance(
                    policy="uniform",
                    version=0,
                    engine="none",
                    precision="float32",
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    logprob_mode="processed",
                ),
                text="",
            ),
            advantage=1.0 if number % 2 else -1.0,
        )
        for number in range(case.num_sequences)
    ]


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
