"""Matrix products where torch's own are not the fastest, or not the most exact, of a device.

- Float32 on CPUs of AMD with AVX-512: torch takes MKL, whose kernels for CPUs of other makers are
  half as wide. oneDNN, which is in torch as well, has no such limit, so it computes large products
  of linear layers and heads: about twice as fast, in the same precision.
- Operands with values of bfloat16, summed and kept in float32.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

LEAST_WORK = 2**26
"""multiplications in a product from which oneDNN pays: it needs 0.2 ms for each new shape"""


@functools.cache
def has_onednn_products() -> bool:
    """Whether this build of torch has oneDNN's products of linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN is faster than what torch takes for float32 on this CPU."""
    if not (has_onednn_products() and torch.backends.mkl.is_available()):
        return False
    about = Path("/proc/cpuinfo")
    is_amd = about.is_file() and "AuthenticAMD" in about.read_text(errors="replace")
    return is_amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices of one dtype."""
    if left.dtype != torch.float32 or left.device.type != "cpu" or not prefers_onednn():
        return torch.mm(left, right)
    if left.shape[0] * right.numel() < LEAST_WORK:
        return torch.mm(left, right)
    return multiply_by_onednn(left, right.t())


def multiply_by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [n, in] times weight [out, in], packed or not, transposed, plus the bias."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def multiply_rounded(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of operands with values of bfloat16, summed and kept in float32.

    On CUDA the operands are bfloat16. On a CPU, where torch has no such product, they are float32,
    and one with instructions for bfloat16 makes use of them.
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


def speed_up_linear_layers(model: nn.Module) -> None:
    """Let linear layers in float32 on a CPU multiply as `multiply` does, in both passes."""
    if not prefers_onednn():
        return
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu":
            layer.forward = functools.partial(_forward, layer)


def restore_linear_layers(model: nn.Module) -> None:
    """Undo `speed_up_linear_layers`, such as for a compiler, whose graphs it would divide."""
    for layer in model.modules():
        forward = vars(layer).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _forward:
            del layer.forward


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    is_float32 = input.dtype == layer.weight.dtype == torch.float32
    if not is_float32 or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, layer.weight, layer.bias)
    if input.numel() * layer.out_features < LEAST_WORK:
        return functional.linear(input, layer.weight, layer.bias)
    return _Linear.apply(input, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    """A linear layer of which all products are computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        rows = multiply_by_onednn(inputs.reshape(-1, inputs.shape[-1]), weight, bias)
        return rows.view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        d_inputs = d_weight = d_bias = None
        if needs_inputs:
            d_inputs = multiply_by_onednn(rows, weight.t()).view_as(inputs)
        if needs_weight:
            d_weight = multiply_by_onednn(rows.t(), inputs.reshape(-1, inputs.shape[-1]).t())
        if needs_bias:
            d_bias = rows.sum(0)
        return d_inputs, d_weight, d_bias
