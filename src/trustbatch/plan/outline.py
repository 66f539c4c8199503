"""Sizes of a model, read from a copy without weights, and of its activations, as measured."""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trustbatch.models.loading import empty_model, without_weights
from trustbatch.models.packing.attention import NAME, REPLACES, no_mask
from trustbatch.models.packing.layout import PackedLayout, Segment
from trustbatch.models.rounding import round_weights
from trustbatch.plan.memory import Lora
from trustbatch.rollout.native.architecture import read_architecture
from trustbatch.training.sharding import decoder_layers

CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""config keys of models that transform their logits, which must then all be in memory"""


@dataclass(frozen=True)
class ModelOutline:
    """A model on the meta device."""

    model: Any

    @classmethod
    def read(cls, name: str, *, trust_remote_code: bool = False) -> "ModelOutline":
        """Read a checkpoint's config, without its weights."""
        return cls(empty_model(name, trust_remote_code=trust_remote_code))

    @property
    def config(self) -> Any:
        """The Hugging Face config of the text model."""
        return self.model.config.get_text_config()

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters; shared ones count once."""
        return _count(self.model.parameters())

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @cached_property
    def largest_layer(self) -> int:
        """Number of parameters of the largest decoder layer."""
        return max((_count(layer.parameters()) for layer in decoder_layers(self.model)), default=0)

    @cached_property
    def around_layers(self) -> int:
        """Number of parameters outside of the decoder layers: embedding, last norm and head."""
        inside = sum(_count(layer.parameters()) for layer in decoder_layers(self.model))
        return self.num_parameters - inside

    @cached_property
    def decoded_weights(self) -> int:
        """Weights that the native engine's fast decoder copies: linear layers and the head."""
        return self.linear_weights + self.head_weights if self.is_decoded_fast else 0

    @cached_property
    def linear_weights(self) -> int:
        """Number of weights of all linear layers in the decoder."""
        return sum(layer.weight.numel() for _, layer in self._linear_layers())

    @cached_property
    def linear_weights_by_width(self) -> dict[int, int]:
        """Number of weights of the decoder's linear layers, by their number of inputs."""
        found: Counter[int] = Counter()
        for _, layer in self._linear_layers():
            found[layer.in_features] += layer.weight.numel()
        return dict(found)

    @cached_property
    def largest_linear(self) -> int:
        """Number of weights of the largest linear layer in the decoder."""
        return max((layer.weight.numel() for _, layer in self._linear_layers()), default=0)

    @cached_property
    def embedded_weights(self) -> int:
        """Number of weights of embeddings and output head; a shared matrix counts once."""
        inside = {id(layer.weight) for _, layer in self._linear_layers()}
        weights = {
            id(module.weight): module.weight.numel()
            for module in self.model.modules()
            if isinstance(module, nn.Linear | nn.Embedding) and id(module.weight) not in inside
        }
        return sum(weights.values())

    @property
    def is_decoded_fast(self) -> bool:
        """Whether the native engine has a fast decoder for it."""
        return read_architecture(self.model) is not None

    @property
    def head_weights(self) -> int:
        """Number of weights of the output head."""
        return self.model.get_output_embeddings().weight.numel()

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return int(self.config.vocab_size)

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def has_plain_logits(self) -> bool:
        """Whether log-probs can be computed without all logits."""
        return not any(getattr(self.config, key, None) for key in CHANGED_LOGITS)

    @property
    def cached_numbers(self) -> int:
        """Numbers per token in the KV cache, over all layers."""
        return self.cached_vectors * self.head_dim

    @property
    def cached_vectors(self) -> int:
        """Keys and values per token in the KV cache, over all layers and heads."""
        config = self.config
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return 2 * self.num_layers * num_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a key or value."""
        config = self.config
        dim = getattr(config, "head_dim", None)
        return int(dim or config.hidden_size // config.num_attention_heads)

    def adapter_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Number of parameters of LoRA adapters on the named layers, or on all linear layers."""
        return sum(
            rank * (layer.in_features + layer.out_features) for layer in self._adapted(targets)
        )

    def _adapted(self, targets: Sequence[str] | None) -> list[nn.Linear]:
        return [
            layer for name, layer in self._linear_layers() if targets is None or name in targets
        ]

    def _linear_layers(self) -> list[tuple[str, nn.Linear]]:
        return [
            (name.rpartition(".")[2], module)
            for layer in decoder_layers(self.model)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        ]


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


LENGTHS = (4, 8)
"""of the two sequences in each pass: the difference gives the bytes per token"""


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd saves for the backward pass, without parameters."""

    layer: float
    """per token and decoder layer"""
    around: float
    """per token outside of the layers"""
    rounded_layer: float
    """per layer, independent of tokens: autocast's rounded copies of its weights"""


def measure_activations(
    outline: ModelOutline,
    *,
    precision: torch.dtype | None,
    trust_remote_code: bool = False,
    lora: Lora | None = None,
    frozen: torch.dtype = torch.float32,
) -> Activations:
    """Measure with four small passes over models of one and two layers, in about a second.

    With `lora` the layers have adapters, beside frozen weights of the given type.

    Weights are uninitialized: sizes do not depend on them. Attention saves the same on a CPU as on
    a GPU: query, key, value, output and normalizer.
    """
    decoders = {
        depth: _shallow(outline, depth, trust_remote_code=trust_remote_code) for depth in (1, 2)
    }
    if lora is not None:
        for decoder in decoders.values():
            _adapt(decoder, lora, frozen)
    saved = {
        (depth, length): _saved_bytes(decoders[depth], length, precision)
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
    """Return the decoder of the same model with fewer layers and uninitialized weights."""
    config = copy.deepcopy(outline.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = depth
    # saved tensors do not depend on the number of embeddings
    text.vocab_size, text.pad_token_id = 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    model = without_weights(config, trust_remote_code=trust_remote_code).eval()
    if model.config._attn_implementation == REPLACES and model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
    return model.get_decoder().to_empty(device="cpu")


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter, as PEFT computes it; PEFT may not be installed."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs)) * 2.0


def _adapt(decoder: Any, lora: Lora, frozen: torch.dtype) -> None:
    """Freeze a model, and add adapters to its layers."""
    decoder.requires_grad_(False)
    if frozen == torch.bfloat16:
        round_weights(decoder)
    for owner in list(decoder.modules()):
        for name, layer in list(owner.named_children()):
            if type(layer) is nn.Linear and (lora.targets is None or name in lora.targets):
                setattr(owner, name, _Adapted(layer, lora.rank))


def _never_read(saved: Any) -> Tensor:
    raise AssertionError("there is no backward pass")


def _saved_bytes(decoder: Any, length: int, precision: torch.dtype | None) -> int:
    """Return the bytes of all distinct tensors saved by a pass over two sequences."""
    ids = torch.zeros(2 * length, dtype=torch.long)
    layout = PackedLayout.of([Segment(length), Segment(length)])
    parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    saved: dict[int, Tensor] = {}  # kept alive, so that their memory is not reused

    def note(tensor: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() not in parameters:
            # without the graph, which holds this function and with it all saved tensors
            saved[tensor.untyped_storage().data_ptr()] = tensor.detach()

    rounding = nullcontext() if precision is None else torch.autocast("cpu", dtype=precision)
    packs = decoder.config._attn_implementation == NAME
    with torch.autograd.graph.saved_tensors_hooks(note, _never_read), rounding:
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
