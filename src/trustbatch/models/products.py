"""Matrix products where torch's own are not the fastest, or not the most exact, of a device.

- Float32 on CPUs of AMD with AVX-512: torch takes MKL, and oneDNN, which is in torch as well, was
  measured to be twice as fast in the same precision. It computes large products of linear layers
  and heads there.
- Operands of 16 bits on CUDA, with a result in float32.
"""

import functools
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
    """Return the product of two matrices, in at least float32.

    Operands of 16 bits must be on CUDA: elsewhere torch can't multiply them into float32.
    """
    if left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    is_large = left.shape[0] * right.numel() >= LEAST_WORK
    needs_gradient = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if not is_large or needs_gradient or not _is_float32_on_cpu(left) or not prefers_onednn():
        return torch.mm(left, right)
    return multiply_by_onednn(left, right.t())


def multiply_by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [n, in] times weight [out, in], packed or not, transposed, plus the bias."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def speed_up_linear_layers(model: nn.Module) -> None:
    """Let linear layers in float32 on a CPU multiply as `multiply` does, in both passes."""
    if not prefers_onednn():
        return
    for layer in model.modules():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = functools.partial(_forward, layer)


def restore_linear_layers(model: nn.Module) -> None:
    """Undo `speed_up_linear_layers`, such as for a compiler, whose graphs it would divide."""
    for layer in model.modules():
        forward = vars(layer).get("forward")
        if isinstance(forward, functools.partial) and forward.func is _forward:
            del layer.forward


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    # the model may have moved to a GPU since
    is_plain = _is_float32_on_cpu(input) and _is_float32_on_cpu(layer.weight)
    is_large = input.numel() * layer.out_features >= LEAST_WORK
    if not is_plain or not is_large or torch.is_autocast_enabled("cpu"):
        return functional.linear(input, layer.weight, layer.bias)
    return _Linear.apply(input, layer.weight, layer.bias)


def _is_float32_on_cpu(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class _Linear(torch.autograd.Function):
    """A linear layer of which all products are computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_inputs, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if needs_weight else None, weight if needs_inputs else None)
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
            d_inputs = multiply_by_onednn(rows, weight.t()).view(*gradient.shape[:-1], -1)
        if needs_weight:
            d_weight = multiply_by_onednn(rows.t(), inputs.reshape(-1, inputs.shape[-1]).t())
        if needs_bias:
            d_bias = rows.sum(0)
        return d_inputs, d_weight, d_bias
