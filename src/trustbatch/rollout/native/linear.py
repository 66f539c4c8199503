"""Matrix products of the native engine: the trainer's weights, in the engine's precision.

Layers with the same input (query, key and value; gate and up) are one product. Beside the trainer's
parameters there may be a rounded or reordered copy of them. `refresh` updates it in place before
each generation, so that CUDA graphs keep reading the right memory.

With adapters the frozen weights are read where the trainer has them, and adapters are computed as
the trainer computes them: W x + scale B (A x). On a CPU in float32 they are merged into a copy,
which is made anyway for its layout, and which float32 rounds as little as the sum of two products.

FP8 is e4m3: a row is scaled so that its largest magnitude becomes the largest e4m3 number, and
scaled back when it is used, weights per output channel and activations per token.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trustbatch.errors import ConfigError
from trustbatch.models.lora import adapter_of, frozen_layer, is_adapted, merged_weight, scale_of
from trustbatch.models.products import has_onednn_products, multiply, multiply_by_onednn
from trustbatch.rollout.native import operations
from trustbatch.rollout.native.quantized_linear import QuantizedProduct, are_quantized

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max  # 448
SPARE_MULTIPLE = 16
"""of rows below joined weights, so that rows of outputs stay aligned for tensor cores"""


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

    def refresh(self) -> None:
        """Reorder the current weights."""
        self.packed = torch.empty(0)  # frees the old copy first
        weight, self.bias = _joined(self.layers, torch.float32)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS_EXPECTED)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        return multiply_by_onednn(inputs, self.packed, self.bias)


class JoinedLinear:
    """Frozen weights of the engine's dtype as one matrix, of which the layers' own are views.

    So there is no copy, and one product instead of several. Below the weights there are `spare`
    rows, for the A of adapters: their outputs follow those of the layers.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, num_spare: int) -> None:
        num_spare += -num_spare % SPARE_MULTIPLE
        self.weight = _join_in_place(layers, num_spare)
        self.spare = self.weight[len(self.weight) - num_spare :]
        self.bias = _joined_bias(layers, self.weight.dtype)
        if self.bias is not None:
            self.bias = functional.pad(self.bias, (0, num_spare))

    def refresh(self) -> None:
        """Do nothing: there is no copy."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out + spare]."""
        return functional.linear(inputs, self.weight, self.bias)


class AdaptedLinear:
    """Frozen layers, computed by `base`, and low-rank adapters in the given dtype beside them.

    Sums and products are rounded where the trainer's forward pass rounds them.
    """

    def __init__(self, base: Linear, layers: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self.base = base
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        down, _ = next(adapter_of(layer) for layer in layers if is_adapted(layer))
        self.scale = next(scale_of(layer) for layer in layers if is_adapted(layer))
        self.rank = len(down)
        self.is_joined = isinstance(base, JoinedLinear)
        # a layer without an adapter has one of zeros
        num_rows = self.rank * len(layers)
        if isinstance(base, JoinedLinear):
            self.down = base.spare[:num_rows]
        else:
            self.down = torch.zeros(num_rows, down.shape[1], dtype=dtype, device=down.device)
        self.up = torch.zeros(sum(self.sizes), self.rank, dtype=dtype, device=down.device)
        self.add = operations.add_low_rank
        if self.up.is_cuda and dtype == torch.bfloat16:
            from trustbatch.rollout.native.adapter_kernels import add_low_rank

            self.add = add_low_rank

    def refresh(self) -> None:
        """Round the current adapters, and frozen weights of which there is a copy."""
        self.base.refresh()
        downs, ups = self.down.split(self.rank), self.up.split(self.sizes)
        for layer, down, up in zip(self.layers, downs, ups, strict=True):
            if is_adapted(layer):
                for own, part in zip((down, up), adapter_of(layer), strict=True):
                    own.copy_(part.detach())

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        outputs = self.base(inputs)
        if self.is_joined:
            down = outputs[:, len(self.up) :][:, : len(self.down)]
            outputs = outputs[:, : len(self.up)]
        else:
            down = functional.linear(inputs.to(self.down.dtype), self.down)
        return self.add(outputs, down, self.up, self.sizes, self.scale)


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

    Rounding a logit of 16 changes it by up to 0.06, more than all layers before it together. A
    head in bfloat16 has no copy on a GPU.
    """

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.weight = self._rounded()

    def refresh(self) -> None:
        """Round the current weights."""
        rounded = self._rounded()
        if rounded.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(rounded)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map [n, in] to [n, out] in float32."""
        rows = inputs.to(torch.bfloat16).to(self.weight.dtype)
        logits = multiply(rows, self.weight.t())
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
    wanted = _product_dtype(precision, parameter)
    if is_head and wanted == torch.bfloat16:
        return RoundedHead(layers[0])
    if precision == "float32" and not parameter.is_cuda and has_onednn_products():
        return PackedLinear(layers)
    if not any(is_adapted(layer) for layer in layers):
        if are_quantized(layers):
            return _build_frozen(layers, layers, precision)
        if precision == "fp8":
            return _build_fp8(layers)
        return OwnLinear(layers) if parameter.dtype == wanted else RoundedLinear(layers, wanted)
    frozen = [frozen_layer(layer) for layer in layers]
    return AdaptedLinear(_build_frozen(frozen, layers, precision), layers, wanted)


def _build_frozen(
    frozen: Sequence[nn.Linear], layers: Sequence[nn.Linear], precision: str
) -> Linear:
    """Choose how frozen weights are multiplied; `layers` are the same, with their adapters."""
    if precision == "fp8":
        return _build_fp8(frozen)
    wanted = getattr(torch, precision)
    if are_quantized(frozen):
        return QuantizedProduct(frozen, wanted)
    if all(layer.weight.dtype == wanted for layer in frozen):
        rank = next(len(adapter_of(layer)[0]) for layer in layers if is_adapted(layer))
        return JoinedLinear(frozen, num_spare=rank * len(layers))
    return RoundedLinear(frozen, wanted)


def _build_fp8(layers: Sequence[nn.Linear]) -> Linear:
    parameter = layers[0].weight
    if not parameter.is_cuda:
        return EmulatedFp8Linear(layers, torch.float32)
    if torch.cuda.get_device_capability(parameter.device) < (8, 9):
        raise ConfigError(
            'rollout.precision = "fp8" needs a GPU with FP8 products (compute capability 8.9 '
            "or newer): use bfloat16 on this one."
        )
    return Fp8Linear(layers)


def _product_dtype(precision: str, parameter: Tensor) -> torch.dtype:
    """Return the dtype of a product's result."""
    if precision == "fp8":
        return torch.bfloat16 if parameter.is_cuda else torch.float32
    return getattr(torch, precision)


def _join_in_place(layers: Sequence[nn.Linear], num_spare: int) -> Tensor:
    """Return the layers' weights as one matrix, whose views they become, and spare rows of 0.

    Where an engine before has done so, with as many rows, it is the same matrix.
    """
    first = layers[0].weight.detach()
    num_rows, width = sum(layer.out_features for layer in layers) + num_spare, first.shape[1]
    is_joined = first.untyped_storage().nbytes() == num_rows * width * first.element_size()
    start = first.data_ptr()
    for layer in layers:
        is_joined = is_joined and layer.weight.data_ptr() == start
        start += layer.weight.nbytes
    if is_joined:
        return first.as_strided((num_rows, width), (width, 1))
    joined = first.new_zeros(num_rows, width)
    parts = joined[: num_rows - num_spare].split([layer.out_features for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        part.copy_(layer.weight.detach())
        layer.weight.data = part
    return joined


def _joined(layers: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the concatenated weights and biases of all layers."""
    weights = [merged_weight(layer).to(dtype) for layer in layers]
    return weights[0] if len(weights) == 1 else torch.cat(weights), _joined_bias(layers, dtype)


def _joined_bias(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat([bias.to(dtype) for bias in biases])


def _copy_joined(layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        part.copy_(layer.weight.detach())
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
