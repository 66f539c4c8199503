"""Matrix products of the native engine: the trainer's weights, in the engine's precision.

Layers with the same input (query, key and value; gate and up) are one product. Beside the trainer's
parameters there may be a rounded or reordered copy of them, with adapters merged. `refresh` updates
it in place before each generation, so that CUDA graphs keep reading the right memory.

FP8 is e4m3: a row is scaled so that its largest magnitude becomes the largest e4m3 number, and
scaled back when it is used, weights per output channel and activations per token.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trustbatch.errors import ConfigError
from trustbatch.models.lora import is_adapted, merged_weight

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max  # 448


class Linear(Protocol):
    """The concatenated outputs of one or more nn.Linear layers on the same input."""

    def refresh(self) -> None:
        """Read the current values of the trainer's parameters."""
        ...

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        ...


class OwnLinear:
    """The trainer's parameters themselves, if their dtype is the engine's."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers

    def refresh(self) -> None:
        """Do nothing: there is no copy."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        outputs = [functional.linear(inputs, layer.weight, layer.bias) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class PackedLinear:
    """Float32 on a CPU, in oneDNN's blocked layout: up to twice as fast for few rows."""

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
        """Reorder the current weights."""
        self.packed = torch.empty(0)  # frees the old copy first
        weight, self.bias = _joined(self.layers, torch.float32)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_EXPECTED)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


class RoundedLinear:
    """Products in another dtype than the parameters': as autocast computes, rounded once."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        self.dtype = dtype
        self.weight, self.bias = _joined(layers, dtype)

    def refresh(self) -> None:
        """Round the current weights."""
        _copy_joined(self.layers, self.weight, self.bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out] in the given dtype."""
        return functional.linear(inputs.to(self.dtype), self.weight, self.bias)


class RoundedHead:
    """The output head: bfloat16 operands as in other layers, but float32 logits.

    Rounding a logit of 16 changes it by up to 0.06, more than all layers before it together.
    """

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.weight = self._rounded()

    def refresh(self) -> None:
        """Round the current weights."""
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
        # only CUDA has products of bfloat16 with float32 output; elsewhere the copy is float32
        return rounded if rounded.is_cuda else rounded.float()


class Fp8Linear:
    """FP8 products on a GPU: e4m3 weights per output channel, e4m3 activations per token."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        weight, self.bias = _joined(layers, torch.bfloat16)
        self.weight, scale = quantize_rows(weight)
        self.scale = scale.t().contiguous()

    def refresh(self) -> None:
        """Quantize the bfloat16 values of the current weights."""
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
    """FP8 rounding on a device without FP8: e4m3 values, multiplied in the given dtype."""

    def __init__(self, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.layers = layers
        self.dtype = dtype
        self.weight = torch.empty(0)
        self.bias: Tensor | None = None

    def refresh(self) -> None:
        """Round the bfloat16 values of the current weights."""
        weight, self.bias = _joined(self.layers, torch.bfloat16)
        self.weight = round_rows(weight.float()).to(self.dtype)
        self.bias = None if self.bias is None else self.bias.to(self.dtype)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        return functional.linear(round_rows(inputs.to(self.dtype)), self.weight, self.bias)


def build_linear(layers: Sequence[nn.Linear], *, precision: str, is_head: bool = False) -> Linear:
    """Choose how a product is computed; the head is not quantized, as in other engines."""
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
    """Return the concatenated weights and biases of all layers."""
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


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [..., n] as e4m3, and the float32 scales [..., 1] that undo the scaling."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
    return (rows / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def round_rows(rows: Tensor) -> Tensor:
    """Return rows rounded to e4m3, in their own dtype: FP8 on devices without it."""
    quantized, scale = quantize_rows(rows)
    return (quantized.float() * scale).to(rows.dtype)
