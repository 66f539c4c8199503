"""Sequences to train on, and a few steps of training."""

import math
from collections.abc import Sequence

import torch

from trustbatch.batching.micro_batches import micro_batches
from trustbatch.models.policy import Policy
from trustbatch.objectives import build_objective
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.training.config import TrainingConfig
from trustbatch.training.logprobs import token_logprobs
from trustbatch.training.trainer import Trainer
from trustbatch.types import GenerationRequest, SamplingParams, TrainSequence


def sample_sequences(policy: Policy, *, engine: NativeEngine | None = None) -> list[TrainSequence]:
    """Completions of unequal length of three prompts, with some advantages."""
    engine = engine or NativeEngine(policy, seed=0)
    sampling = SamplingParams(max_tokens=9, stop_token_ids=policy.stop_token_ids)
    requests = [
        GenerationRequest(
            prompt_id=text,
            token_ids=tuple(policy.tokenizer.encode(text)),
            num_samples=5,
            sampling=sampling,
        )
        for text in ("1+1=", "12+34=", "7=")
    ]
    return [
        TrainSequence(
            prompt_token_ids=requests[number // 5].token_ids,
            completion=completion,
            advantage=math.sin(number),
        )
        for number, completion in enumerate(engine.generate(requests))
    ]


def make_trainer(
    policy: Policy,
    *,
    objective: dict[str, object] | None = None,
    reference: Policy | None = None,
    **settings: object,
) -> Trainer:
    """A trainer with a learning rate that shows."""
    config = TrainingConfig.model_validate(
        {"steps": 10, "learning_rate": 1e-2, "warmup_fraction": 0.0} | settings
    )
    return Trainer(
        policy,
        build_objective(**(objective or {"name": "grpo"})),  # type: ignore[arg-type]
        config,
        policy_temperature=1.0,
        seed=0,
        reference=reference,
    )


def train(
    policy: Policy, sequences: Sequence[TrainSequence], *, num_steps: int, **options: object
) -> Trainer:
    """Take a few steps on the same sequences."""
    trainer = make_trainer(policy, **options)  # type: ignore[arg-type]
    for _ in range(num_steps):
        trainer.train(sequences)
    return trainer


@torch.no_grad()
def policy_logp(
    policy: Policy, sequences: Sequence[TrainSequence], *, temperature: float = 1.0
) -> torch.Tensor:
    """The trainer's log-probs of all response tokens, in the order of the sequences."""
    parts = []
    for sequence in sequences:
        (batch,) = micro_batches(
            [sequence],
            max_tokens=10_000,
            pad_token_id=policy.pad_token_id,
            packs=policy.packs,
            may_share_prompts=False,
        )
        on_device = batch.to(policy.device)
        parts.append(token_logprobs(policy, on_device, temperature=temperature).logp)
    return torch.cat(parts)


def watch_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return a dictionary that holds the gradients of the last step that was taken."""
    found: dict[str, torch.Tensor] = {}

    def note(*_: object) -> None:
        for name, parameter in trainer.policy.trained_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()

    trainer.optimizer.register_step_pre_hook(note)
    return found


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all gradients, concatenated."""
    return torch.cat([each.flatten() for each in gradients.values()])
