"""Hugging Face models of the Llama family: Llama, Mistral, Qwen2, Qwen3 and the like.

They only differ in sizes, biases and norms of queries and keys. Linear layers may have adapters.
Other models are decoded by their own forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trustbatch.models.lora import is_linear
from trustbatch.rollout.native.cache import Heads

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""rotary embeddings that do not depend on the sequence length"""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model of the family, and its layers as the trainer holds them."""

    model: Any
    heads: Heads

    @property
    def layers(self) -> Sequence[Any]:
        """The decoder layers."""
        return self.model.model.layers

    def rotary(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, D] in float32, from the model's own embedding."""
        positions = torch.arange(num_positions, device=device)[None]
        like = torch.empty(0, dtype=torch.float32, device=device)
        cosines, sines = self.model.model.rotary_emb(like, positions)
        return cosines[0].contiguous(), sines[0].contiguous()


def read_architecture(model: Any) -> Architecture | None:
    """Return the architecture for the fast decoder, or None if it can't decode the model."""
    config = model.config
    if config.model_type not in FAMILY or not hasattr(model, "model"):
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = getattr(config, "rope_parameters", None) or {}
    usual = (
        config.hidden_act == "silu"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and (config.model_type != "mistral" or config.sliding_window is None)
        and rotary.get("rope_type", "default") in FIXED_ROTARY
        and rotary.get("partial_rotary_factor", 1.0) == 1.0
        and all(is_linear(layer) for layer in _linear_layers(model))
        # kernel tiles have a power of two of columns
        and head_dim & (head_dim - 1) == 0
        and head_dim >= 16
    )
    if not usual:
        return None
    return Architecture(
        model=model,
        heads=Heads(
            num_query=config.num_attention_heads,
            num_kv=config.num_key_value_heads,
            dim=head_dim,
            epsilon=config.rms_norm_eps,
        ),
    )


def _linear_layers(model: Any) -> list[Any]:
    found = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        found += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return found
