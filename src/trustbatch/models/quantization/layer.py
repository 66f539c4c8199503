"""A frozen linear layer with quantized weights, for trainer and native engine alike."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trustbatch.models.quantization.formats import FORMATS, Codes, Format, quantize


class QuantizedLinear(nn.Linear):
    """W x + b with a quantized W, which is de-quantized in each pass, backward too.

    Codes and scales are kept as integers, so that casting a model leaves them as they are, and
    outside of the state dict, which has the weights of ordinary models.
    """

    codes: Tensor
    scale_bits: Tensor

    def __init__(self, weight: Codes, bias: Tensor | None) -> None:
        nn.Module.__init__(self)  # nn.Linear would create a weight
        self.out_features, self.in_features = len(weight.codes), weight.columns
        self.format: Format = weight.format
        self.weight_dtype = torch.float32
        """of what leaves the layer: the numbers that products in this type have"""
        self.register_buffer("codes", weight.codes, persistent=False)
        self.register_buffer("scale_bits", weight.scales.view(torch.int32), persistent=False)
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)

    @property
    def quantized(self) -> Codes:
        """The weight as it is stored."""
        scales = self.scale_bits.view(torch.float32)
        return Codes(self.codes, scales, self.format, self.in_features)

    @quantized.setter
    def quantized(self, weight: Codes) -> None:
        self.codes, self.scale_bits = weight.codes, weight.scales.view(torch.int32)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight [out, in], made anew each time."""
        return self.quantized.dequantized(self.weight_dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out], with products in the type of autocast or of the input."""
        device = input.device.type
        dtype = input.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(input.to(dtype), self.codes, self.scale_bits, bias, self.format.name)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model."""
        return f"{super().extra_repr()}, {self.format.name}"


class _Product(torch.autograd.Function):
    """A linear layer whose de-quantized weight is not kept for the backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, rows: Tensor, codes: Tensor, scale_bits: Tensor, bias: Tensor | None, name: str
    ) -> Tensor:
        ctx.save_for_backward(codes, scale_bits)
        ctx.name, ctx.columns = name, rows.shape[-1]
        weight = _dequantized(codes, scale_bits, name, rows.shape[-1], rows.dtype)
        return functional.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        codes, scale_bits = ctx.saved_tensors
        weight = _dequantized(codes, scale_bits, ctx.name, ctx.columns, grad.dtype)
        return grad @ weight, None, None, None, None


# as one operation, which torch.compile does not look into
@torch.library.custom_op("trustbatch::dequantized", mutates_args=())
def _dequantized(
    codes: Tensor, scale_bits: Tensor, name: str, columns: int, dtype: torch.dtype
) -> Tensor:
    weight = Codes(codes, scale_bits.view(torch.float32), FORMATS[name], columns)
    return weight.dequantized(dtype)


@_dequantized.register_fake
def _(codes: Tensor, scale_bits: Tensor, name: str, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(len(codes), columns, dtype=dtype)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def quantization_of(model: nn.Module) -> str | None:
    """Return the format of a model's quantized layers; None if it has none."""
    found = {layer.format.name for layer in quantized_layers(model).values()}
    return min(found) if found else None


@torch.no_grad()
def quantize_linears(model: Any, name: str, device: torch.device) -> None:
    """Quantize all linear layers but the head, one at a time, on a device where they stay."""
    head = model.get_output_embeddings()
    for owner in list(model.modules()):
        for child, layer in list(owner.named_children()):
            if type(layer) is nn.Linear and layer is not head:
                setattr(owner, child, _quantized(layer, name, device))


def _quantized(layer: nn.Linear, name: str, device: torch.device) -> QuantizedLinear:
    bias = None if layer.bias is None else layer.bias.to(device)
    return QuantizedLinear(quantize(layer.weight.to(device), name), bias)
