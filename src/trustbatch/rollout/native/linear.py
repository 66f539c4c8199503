"""Matrix products of the native engine: the trainer's own weights, in the precision asked for.

Layers that read the same input (query, key and value; gate and up) are one product. What is kept
beside the trainer's parameters is a rounded or re-ordered image of them, made anew by `refresh`
before each generation, in place: a recorded CUDA graph goes on reading the right memory. Adapters
are merged into it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trustbatch.errors import ConfigError
from trustbatch.models.lora import is_adapted, merged_weight
from trustbatch.rollout.fp8 import quantize_rows, round_rows


class Linear(Protocol):
    """The outputs of one or more nn.Linear layers on the same input, side by side."""

    def refresh(self) -> None:
        """Take over the present values of the trainer's parameters."""
        ...

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        ...


class OwnLinear:
    """The trainer's parameters themselves, where their type is the engine's."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers

    def refresh(self) -> None:
        """Nothing is kept."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        outputs = [functional.linear(inputs, layer.weight, layer.bias) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class PackedLinear:
    """Float32 on a CPU, in oneDNN's blocked order: up to twice as fast at decoding's few rows."""

    ROWS_EXPECTED = 64

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self.bias: Tensor | None = None
        self.packed = torch.empty(0)

    @staticmethod
    def available() -> bool:
        """Whether this build of torch has oneDNN's packed products."""
        return torch.backends.mkldnn.is_available() and hasattr(
            torch.ops.mkldnn, "_linear_pointwise"
        )

    def refresh(self) -> None:
        """Re-order the present weights."""
        self.packed = torch.empty(0)  # the memory that the last ones took is used again
        weight, self.bias = _joined(self.layers, torch.float32)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_EXPECTED)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


class RoundedLinear:
    """Products in another type than the parameters': what autocast computes, rounded once."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        self.dtype = dtype
        self.weight, self.bias = _joined(layers, dtype)

    def refresh(self) -> None:
        """Round the present weights."""
        _copy_joined(self.layers, self.weight, self.bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out] in the given type."""
        return functional.linear(inputs.to(self.dtype), self.weight, self.bias)


class RoundedHead:
    """The output head: bfloat16 operands as elsewhere, but logits that are not rounded.

    A rounded logit of 16 is wrong by up to 0.06, more than all layers before it together.
    """

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.weight = self._rounded()

    def refresh(self) -> None:
        """Round the present weights."""
        self.weight.copy_(self._rounded())

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out] in float32."""
        rows = inputs.to(torch.bfloat16)
        if self.weight.is_cuda:
            logits = torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        else:
            logits = rows.float() @ self.weight.t()
        return logits if self.head.bias is None else logits + self.head.bias

    def _rounded(self) -> Tensor:
        rounded = self.head.weight.detach().to(torch.bfloat16)
        # only CUDA multiplies bfloat16 into float32; elsewhere the rounded numbers are float32
        return rounded if rounded.is_cuda else rounded.float()


class Fp8Linear:
    """Real FP8 on a GPU: e4m3 weights by output channel, e4m3 activations by token."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        weight, self.bias = _joined(layers, torch.bfloat16)
        self.weight, scale = quantize_rows(weight)
        self.scale = scale.t().contiguous()

    def refresh(self) -> None:
        """Quantize the bfloat16 values of the present weights."""
        weight, bias = _joined(self.layers, torch.bfloat16)
        quantized, scale = quantize_rows(weight)
        self.weight.copy_(quantized)
        self.scale.copy_(scale.t())
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out] in bfloat16."""
        from trustbatch.rollout.native.kernels import quantize_tokens

        rows, scale = quantize_tokens(inputs)
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


class EmulatedFp8Linear:
    """The rounding of FP8 on a device without it: e4m3 values, multiplied in the given type."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        self.dtype = dtype
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None

    def refresh(self) -> None:
        """Round the bfloat16 values of the present weights."""
        weight, self.bias = _joined(self.layers, torch.bfloat16)
        self.weight = round_rows(weight.float()).to(self.dtype)
        self.bias = None if self.bias is None else self.bias.to(self.dtype)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        return functional.linear(round_rows(inputs.to(self.dtype)), self.weight, self.bias)


def build_linear(layers: Sequence[nn.Linear], *, precision: str, is_head: bool = False) -> Linear:
    """Choose how a product is computed; the head stays unquantized, as in other engines."""
    parameter = layers[0].weight
    if precision == "fp8" and is_head:
        precision = "bfloat16" if parameter.is_cuda else "float32"
    if precision == "fp8":
        if not parameter.is_cuda:
            return EmulatedFp8Linear(layers, torch.float32)
        if torch.cuda.get_device_capability(parameter.device) < (8, 9):
            raise ConfigError(
                'rollout.precision = "fp8" needs a GPU with FP8 products (compute capability 8.9 '
                "or newer): use bfloat16 on this one."
            )
        return Fp8Linear(layers)
    wanted = getattr(torch, precision)
    if is_head and wanted == torch.bfloat16:
        return RoundedHead(layers[0])
    if wanted == torch.float32 and not parameter.is_cuda and PackedLinear.available():
        return PackedLinear(layers)
    is_own = parameter.dtype == wanted and not any(is_adapted(layer) for layer in layers)
    return OwnLinear(layers) if is_own else RoundedLinear(layers, wanted)


def _joined(layers: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return weights and biases of all layers, one below the other."""
    weights = [merged_weight(layer).to(dtype) for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [
        weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return weight, torch.cat([bias.to(dtype) for bias in biases])


def _copy_joined(layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        part.copy_(merged_weight(layer))
    if bias is not None:
        for layer, part in zip(layers, bias.split(sizes), strict=True):
            if layer.bias is not None:
                part.copy_(layer.bias.detach())
