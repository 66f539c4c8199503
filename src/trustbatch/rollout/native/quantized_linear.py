"""Products of quantized layers in the native engine: the weights that the trainer multiplies."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from trustbatch.models.quantization.formats import Codes
from trustbatch.models.quantization.layer import QuantizedLinear


class QuantizedProduct:
    """Quantized layers as one matrix, of which the layers' own codes are views.

    On a GPU the weights of a product of few rows, as in decoding, are de-quantized inside of it.
    Those of others are first written to memory, which then costs less than the product itself. A
    CPU has room for a de-quantized copy, and no kernel that does without.
    """

    def __init__(self, layers: Sequence[QuantizedLinear], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weight = _join_in_place(layers)
        self.bias = _joined_bias(layers, dtype)
        self.copy = None if self.weight.codes.is_cuda else self.weight.dequantized(dtype)

    def refresh(self) -> None:
        """Do nothing: the weights are frozen."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out] in the given dtype."""
        inputs = inputs.to(self.dtype)
        if self.copy is not None:
            return functional.linear(inputs, self.copy, self.bias)
        from trustbatch.models.quantization.kernels import multiplies, multiply

        if multiplies(inputs, self.weight):
            return multiply(inputs, self.weight, self.bias)
        return functional.linear(inputs, self.weight.dequantized(self.dtype), self.bias)


def are_quantized(layers: Sequence[nn.Linear]) -> TypeGuard[Sequence[QuantizedLinear]]:
    """Whether all layers are quantized; a model has a single format."""
    return all(isinstance(layer, QuantizedLinear) for layer in layers)


def _join_in_place(layers: Sequence[QuantizedLinear]) -> Codes:
    """Return the weights of all layers as one, of which their own become views."""
    parts = [layer.quantized for layer in layers]
    if len(parts) == 1:
        return parts[0]
    codes, scales = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales")
    )
    sizes = [len(part.codes) for part in parts]
    for layer, own_codes, own_scales in zip(
        layers, codes.split(sizes), scales.split(sizes), strict=True
    ):
        layer.quantized = Codes(own_codes, own_scales, layer.format, layer.in_features)
    return Codes(codes, scales, layers[0].format, layers[0].in_features)


def _joined_bias(layers: Sequence[QuantizedLinear], dtype: torch.dtype) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = [
        torch.zeros(layer.out_features, device=layer.codes.device)
        if layer.bias is None
        else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat([bias.to(dtype) for bias in biases])
