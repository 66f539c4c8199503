"""Frozen weights in bfloat16: what a model with adapters keeps of the model that it adapts.

Matrix products under autocast round their operands anyway, so this changes no product; and weights
that were published in bfloat16, as most are, it does not change at all.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trustbatch.models.quantization.layer import QuantizedLinear


def round_weights(model: nn.Module) -> None:
    """Keep linear layers, head and embeddings in bfloat16, and all other parameters in float32.

    Under autocast the output of an embedding stays float32, so that the residual stream does.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.weight_dtype = torch.bfloat16
        is_rounded = isinstance(module, nn.Linear | nn.Embedding)
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16 if is_rounded else torch.float32)
        if isinstance(module, nn.Embedding) and _widen not in module._forward_hooks.values():
            module.register_forward_hook(_widen)


def has_rounded_weights(model: Any) -> bool:
    """Whether products need autocast, since weights have another dtype than activations."""
    return model.get_input_embeddings().weight.dtype == torch.bfloat16


def _widen(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    # without autocast a computation chooses its dtypes itself
    return output.float() if torch.is_autocast_enabled(output.device.type) else output
