"""Floating-point operations of an optimizer step, as the top of train_gpu.py says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qwen3_shapes import SHAPES, Shape

from trustbatch.build.session import Session
from trustbatch.config import Config
from trustbatch.types import TrainSequence


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one optimizer step."""

    model: float
    """of all tokens that are trained on, as if each sequence had computed its own prompt"""
    pre_pass: float
    recomputed: float
    shared: float
    """of the layers, for copies of prompts that were not computed"""

    @property
    def all(self) -> float:
        """All that were executed, as far as they are counted."""
        return self.model + self.pre_pass + self.recomputed - self.shared


def count_flops(
    case: Any, session: Session, *, has_pre_pass: bool, share_computed: float = 1.0
) -> StepFlops:
    """Count those of a step; `share_computed` of its input tokens went through the layers."""
    num_tokens = case.num_sequences * case.length
    num_responses = case.num_sequences * (case.length - case.prompt_tokens)
    # at 2, 4 or 6 operations for each of these
    frozen, trained = _layer_products(session, num_tokens)
    shared = (1 - share_computed) * (4 * frozen + 6 * trained)
    head = session.policy.model.get_output_embeddings().weight
    if head.requires_grad:
        trained += head.numel() * num_responses
    else:
        frozen += head.numel() * num_responses
    attention = attention_forward(SHAPES[case.shape], [case.length] * case.num_sequences)
    forward = 2 * (frozen + trained) + attention
    layers_forward = forward - 2 * head.numel() * num_responses
    return StepFlops(
        model=4 * frozen + 6 * trained + 3 * attention,
        pre_pass=forward if has_pre_pass else 0.0,
        recomputed=layers_forward if _recomputes_layers(session.config) else 0.0,
        shared=shared,
    )


def share_computed(session: Session, sequences: Sequence[TrainSequence]) -> float:
    """Return which share of their input tokens the layers compute, as prompts may be shared."""
    (batches,) = session.trainer._parts(sequences, 1, pass_number=0)
    return sum(len(batch.input_ids) for batch in batches) / sum(
        sequence.num_tokens - 1 for sequence in sequences
    )


def attention_forward(shape: Shape, lengths: Sequence[int]) -> float:
    """Return the operations of causal attention in a forward pass."""
    pairs = sum(length**2 / 2 for length in lengths)
    return 4.0 * shape.layers * shape.heads * shape.head_dim * pairs


def _layer_products(session: Session, num_tokens: int) -> tuple[float, float]:
    """Return parameters x tokens of the layers, frozen and trained ones."""
    model = session.policy.model
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    layers = [each for each in model.parameters() if id(each) not in tables]
    frozen = sum(each.numel() for each in layers if not each.requires_grad)
    trained = sum(each.numel() for each in layers if each.requires_grad)
    return float(frozen) * num_tokens, float(trained) * num_tokens


def _recomputes_layers(config: Config) -> bool:
    """Return whether the backward pass recomputes the layers."""
    return bool(getattr(config.training, "gradient_checkpointing", False))
