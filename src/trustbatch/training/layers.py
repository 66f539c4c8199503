"""How layers run in training: compiled by torch.compile, or recomputed in the backward pass.

Both replace `forward` of a layer object, beneath its hooks. Parameters, names and classes stay the
same, so a saved model shows nothing of it. FSDP gathers a layer before its forward pass, and again
before the backward pass in which it is recomputed.
"""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils.checkpoint import checkpoint

from trustbatch import models
from trustbatch.errors import ConfigError
from trustbatch.models.policy import decoder_layers
from trustbatch.models.products import restore_linear_layers
from trustbatch.training.host_memory import HostActivations

MAX_GRAPHS = 16
"""graphs per function: with and without gradient, with adapters, for a reference model"""


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile each layer's forward pass, for any number of tokens.

    Layers of the same class share one compiled graph. Packed attention is not compiled.
    """
    if backend == "inductor":
        refuse_missing_compiler("training.compile", "false", next(model.parameters()).device)
        keep_compiled_kernels()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    for layer in _decoder_layers(model, "compile"):
        restore_linear_layers(layer)
        compiled = _compiled(type(layer).forward, backend)
        layer.forward = functools.partial(_run_compiled, compiled, layer, layer.forward)


def recompute_layers(model: nn.Module, *, offload: bool = False) -> None:
    """Checkpoint activations: keep only each layer's input, and recompute the rest in backward.

    With `offload` the inputs are in host memory meanwhile.
    """
    inputs = HostActivations() if offload else nullcontext()
    for layer in _decoder_layers(model, "gradient_checkpointing"):
        layer.forward = functools.partial(_run_recomputed, layer.forward, inputs)


@functools.cache
def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(forward, backend=backend, dynamic=True)


def _run_compiled(
    compiled: Callable[..., Any], layer: nn.Module, plain: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    hidden = args[0] if args else kw["hidden_states"]
    is_decoding = kw.get("past_key_values") is not None
    if is_decoding or hidden.shape[-2] == 1:  # a size of 1 would get a graph of its own
        return plain(*args, **kw)
    return compiled(layer, *args, **kw)


def _run_recomputed(
    forward: Callable[..., Any], inputs: AbstractContextManager[Any], *args: Any, **kw: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kw)
    with inputs:  # what is saved inside the layer is checkpoint's own affair
        # without dropout there is no random state to restore
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kw)


def _decoder_layers(model: nn.Module, key: str) -> list[nn.Module]:
    layers = list(decoder_layers(model))
    if not layers:
        raise ConfigError(
            f"training.{key} needs the decoder layers of a model, and {type(model).__name__} does "
            "not declare them (_no_split_modules): set it to false."
        )
    return layers


def keep_compiled_kernels() -> None:
    """Keep compiled kernels between runs, in a folder that only the user can write to.

    torch's own default is a temporary folder, which is often empty after a restart. Graphs name our
    operators, whose code torch does not look at: each version of it has a folder of its own.
    """
    variable = "TORCHINDUCTOR_CACHE_DIR"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # torch itself sets the variable, to its default, as soon as it is imported whole
    is_chosen = os.environ.get(variable, default_cache_dir()) != default_cache_dir()
    if is_chosen or not caches.is_absolute():
        return
    folder = caches / "trustbatch"
    try:
        caches.mkdir(parents=True, exist_ok=True)
        for part in ("", "compiled", _version_of_operators()):
            folder /= part
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                return  # torch runs what it finds there
    except OSError:  # no home, or one that can't be written to: torch's default then
        return
    if os.access(folder, os.W_OK):
        os.environ[variable] = str(folder)


def _version_of_operators() -> str:
    """Return a name for the code of all modules that may define operators."""
    files = sorted(Path(models.__file__).parent.rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def refuse_missing_compiler(setting: str, instead: str, device: torch.device) -> None:
    """Refuse a setting that compiles for a CPU where no C++ compiler is installed.

    Without this check torch.compile would fail in the middle of the first step.
    """
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise ConfigError(
            f"{setting} needs a C++ compiler on a CPU, and none is installed: install g++, or set "
            f"it to {instead}."
        ) from error
