"""What is rounded to bfloat16: frozen weights of a model with adapters, and operands of a head.

Matrix products under autocast round their operands anyway, so rounded weights change no product;
and weights that were published in bfloat16, as most are, are not changed at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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


def multiply_rounded(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of operands with values of bfloat16, summed and kept in float32.

    On CUDA the operands are bfloat16. On a CPU, where torch has no such product, they are float32,
    and one with instructions for bfloat16 makes use of them: two to three times as fast.
    """
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    with _bfloat16_instructions():
        return torch.mm(left, right)


@contextmanager
def _bfloat16_instructions() -> Iterator[None]:
    """Let oneDNN round float32 operands: those that are rounded already stay what they are."""
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before
