"""How the layers of a model are run in training: compiled, computed again in the backward pass.

Both replace `forward` of a layer object, beneath its hooks. Parameters, names and classes stay, so
nothing of it is seen in a saved model; FSDP gathers a layer before its forward pass, and once more
before its backward pass, in which it is computed again.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trustbatch.errors import ConfigError
from trustbatch.models.policy import decoder_layers
from trustbatch.training.compiler import refuse_missing_compiler

MAX_GRAPHS = 16
"""versions of a function that may be compiled: with and without gradient, adapters, a reference"""


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile each layer's forward pass, for any number of tokens.

    All layers of a kind share what is compiled. Attention over packed tokens is left out.
    """
    if backend == "inductor":
        refuse_missing_compiler("training.compile", "false", next(model.parameters()).device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    for layer in _layers(model, "compile"):
        compiled = _compiled(type(layer).forward, backend)
        layer.forward = functools.partial(_run_compiled, compiled, layer, layer.forward)


def recompute_layers(model: nn.Module) -> None:
    """Keep a layer's input alone for the backward pass, which computes the rest again."""
    for layer in _layers(model, "gradient_checkpointing"):
        layer.forward = functools.partial(_run_recomputed, layer.forward)


@functools.cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(forward, backend=backend, dynamic=True)


def _run_compiled(
    compiled: Callable[..., Any], layer: nn.Module, plain: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    hidden = args[0] if args else kw["hidden_states"]
    is_decoding = kw.get("past_key_values") is not None
    if is_decoding or hidden.shape[-2] == 1:  # a size of 1 would be compiled for itself alone
        return plain(*args, **kw)
    return compiled(layer, *args, **kw)


def _run_recomputed(forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kw)
    # there is no dropout whose random numbers must come again
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kw)


def _layers(model: nn.Module, key: str) -> list[nn.Module]:
    layers = list(decoder_layers(model))
    if not layers:
        raise ConfigError(
            f"training.{key} works on the layers of a model, and {type(model).__name__} does not "
            "say which they are (_no_split_modules): set it to false."
        )
    return layers
