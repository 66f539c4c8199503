"""What a forward pass keeps for its backward pass: measured on one and two layers, on the CPU."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustbatch.models.loading import without_weights
from trustbatch.models.packing.attention import NAME, REPLACES, no_mask
from trustbatch.models.packing.layout import PackedLayout, Segment
from trustbatch.plan.outline import ModelOutline

LENGTHS = (32, 64)
"""of the two sequences in each pass: what grows with them is the tokens' part"""


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd saves, parameters left aside."""

    layer: float
    """of a token in a decoder layer"""
    around: float
    """of a token outside of the layers"""
    rounded_layer: float
    """of a layer, however many tokens: autocast's rounded copies of its weights"""


def measure_activations(
    outline: ModelOutline, *, precision: torch.dtype | None, trust_remote_code: bool = False
) -> Activations:
    """Run four small passes; a width of thousands takes about a second.

    Weights are memory as it comes: sizes do not depend on them. The attention of a CPU saves what
    that of a GPU does: query, key, value, output and normalizer.
    """
    saved = {
        (depth, length): _saved_bytes(
            _shallow(outline, depth, trust_remote_code=trust_remote_code), length, precision
        )
        for depth in (1, 2)
        for length in LENGTHS
    }
    short, long = LENGTHS
    num_tokens = 2 * (long - short)
    both = (saved[1, long] - saved[1, short]) / num_tokens
    second_short = saved[2, short] - saved[1, short]
    layer = (saved[2, long] - saved[1, long] - second_short) / num_tokens
    return Activations(
        layer=layer, around=both - layer, rounded_layer=second_short - layer * 2 * short
    )


def _shallow(outline: ModelOutline, depth: int, *, trust_remote_code: bool) -> Any:
    """Return the decoder of a model like it, of few layers, with memory and no content."""
    config = copy.deepcopy(outline.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = depth
    # embeddings are looked up: what is saved does not depend on how many there are
    text.vocab_size, text.pad_token_id = 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    model = without_weights(config, trust_remote_code=trust_remote_code).eval()
    if model.config._attn_implementation == REPLACES and model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    return model.get_decoder().to_empty(device="cpu")


def _saved_bytes(decoder: Any, length: int, precision: torch.dtype | None) -> int:
    """Return the bytes of all distinct tensors that a pass over two sequences saves."""
    ids = torch.zeros(2 * length, dtype=torch.long)
    layout = PackedLayout.of([Segment(length), Segment(length)])
    parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    saved: dict[int, Tensor] = {}  # they stay alive, or the memory of one becomes another's

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rounding = nullcontext() if precision is None else torch.autocast("cpu", dtype=precision)
    packs = decoder.config._attn_implementation == NAME
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), rounding:
        if packs:
            decoder(
                input_ids=ids[None],
                position_ids=layout.position_ids[None],
                attention_mask=no_mask(ids.device),
                use_cache=False,
                packed=layout,
            )
        else:
            decoder(input_ids=ids.view(2, length), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
