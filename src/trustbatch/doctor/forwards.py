"""The same policy in other precisions, for the time of a `with` block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from trustbatch.models.policy import Policy
from trustbatch.rollout.native.linear import round_rows


@contextmanager
def in_float32(policy: Policy) -> Iterator[None]:
    """Matrix products in float32."""
    precision, policy.precision = policy.precision, "float32"
    try:
        yield
    finally:
        policy.precision = precision


@contextmanager
def in_bfloat16(policy: Policy) -> Iterator[None]:
    """Parameters and activations in bfloat16 throughout, as inference engines run them."""
    with in_float32(policy), _other_values(policy.model.parameters(), lambda p: p.bfloat16()):
        yield


@contextmanager
def in_fp8(policy: Policy) -> Iterator[None]:
    """Weights and inputs of linear layers rounded to e4m3; the output head stays as it is."""
    head = policy.model.get_output_embeddings()
    linears = [
        module
        for module in policy.model.modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    hooks = [module.register_forward_pre_hook(_round_input) for module in linears]
    try:
        # engines quantize the bfloat16 values of the weights
        with _other_values(
            (module.weight for module in linears), lambda w: round_rows(w.bfloat16().float())
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()


FORWARDS: dict[str, Callable[[Policy], AbstractContextManager[Any]]] = {
    "float32": in_float32,
    "bfloat16": in_bfloat16,
    "fp8": in_fp8,
}
"""by the names that engines use for their precision"""


def in_precision(policy: Policy, precision: str | None) -> AbstractContextManager[Any]:
    """Return the context of a precision; None is the trainer's own."""
    return FORWARDS[precision](policy) if precision else nullcontext()


def _round_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (round_rows(inputs[0]), *inputs[1:])


@contextmanager
def _other_values(parameters: Iterator[Any], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give parameters other values; afterwards they have the very storage that they had."""
    kept: list[tuple[Any, Tensor]] = []
    try:
        for parameter in parameters:
            own = parameter.data
            kept.append((parameter, own))
            parameter.data = change(own)
        yield
    finally:
        for parameter, own in kept:
            parameter.data = own
