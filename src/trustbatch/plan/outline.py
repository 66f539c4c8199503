"""Sizes of a model, read off a copy that has shapes and no weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from trustbatch.models.loading import empty_model
from trustbatch.rollout.native.architecture import read_architecture
from trustbatch.training.sharding import decoder_layers

CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""keys of models whose logits are more than a product, so that all of them are in memory"""


@dataclass(frozen=True)
class ModelOutline:
    """A model on the meta device."""

    model: Any

    @classmethod
    def read(cls, name: str, *, trust_remote_code: bool = False) -> "ModelOutline":
        """Read a checkpoint's config; no weight is loaded."""
        return cls(empty_model(name, trust_remote_code=trust_remote_code))

    @property
    def config(self) -> Any:
        """The Hugging Face config of what computes text."""
        return self.model.config.get_text_config()

    @cached_property
    def num_parameters(self) -> int:
        """Parameters; those that two layers share count once."""
        return _count(self.model.parameters())

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.num_hidden_layers)

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest decoder layer."""
        return max((_count(layer.parameters()) for layer in decoder_layers(self.model)), default=0)

    @cached_property
    def around_layers(self) -> int:
        """Parameters outside of the decoder layers: embedding, last norm and head."""
        inside = sum(_count(layer.parameters()) for layer in decoder_layers(self.model))
        return self.num_parameters - inside

    @cached_property
    def decoded_weights(self) -> int:
        """Weights of which the fast decoder has an image: products of all layers, and the head."""
        return self.product_weights + self.head_weights if self.is_decoded_fast else 0

    @cached_property
    def product_weights(self) -> int:
        """Weights of all products in the decoder layers."""
        return sum(layer.weight.numel() for _, layer in self._products())

    @property
    def is_decoded_fast(self) -> bool:
        """Whether the native engine has a decoder of its own for it."""
        return read_architecture(self.model) is not None

    @property
    def head_weights(self) -> int:
        """Weights of the output head."""
        return self.model.get_output_embeddings().weight.numel()

    @property
    def vocabulary(self) -> int:
        """Tokens that have a logit."""
        return int(self.config.vocab_size)

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def has_plain_logits(self) -> bool:
        """Whether log-probs can be computed without all logits."""
        return not any(getattr(self.config, key, None) for key in CHANGED_LOGITS)

    @property
    def cached_numbers(self) -> int:
        """Numbers of a token that decoding keeps: its keys and values in all layers."""
        config = self.config
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * self.num_layers * num_heads * dim

    def adapter_parameters(self, rank: int, targets: Sequence[str] | None) -> int:
        """Parameters of LoRA adapters on the layers of these names, or on all products."""
        return sum(
            rank * (layer.in_features + layer.out_features) for layer in self._adapted(targets)
        )

    def adapted_weights(self, targets: Sequence[str] | None) -> int:
        """Weights of the layers that have an adapter."""
        return sum(layer.weight.numel() for layer in self._adapted(targets))

    def _adapted(self, targets: Sequence[str] | None) -> list[nn.Linear]:
        return [layer for name, layer in self._products() if targets is None or name in targets]

    def _products(self) -> list[tuple[str, nn.Linear]]:
        return [
            (name.rpartition(".")[2], module)
            for layer in decoder_layers(self.model)
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        ]


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)
