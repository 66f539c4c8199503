"""LoRA: low-rank updates of frozen linear layers, created and saved as PEFT does.

A layer computes W x + scale B (A x), in the trainer as in the native engine. Other engines and
exported models get the merged W + scale B A.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trustbatch.errors import ConfigError
from trustbatch.models.config import ALL_LINEAR, LoraConfig
from trustbatch.models.quantization.layer import QuantizedLinear, quantized_layers
from trustbatch.utils.distributed import full_tensor

WEIGHTS_FILE = "adapter_model.safetensors"
_LINEAR = (nn.Linear, QuantizedLinear)
"""kinds of layers that can have an adapter; not their subclasses"""
_NAME = "default"
_BASE = ".base_layer"
_PREFIX = "base_model.model."
"""of every name in the files that PEFT writes"""


class Adapters:
    """The adapters of one model: float32, the only parameters that are trained."""

    def __init__(self, model: Any, config: LoraConfig, *, model_name: str, seed: int) -> None:
        self.model = model
        self.published_alone = False
        """whether engines load adapters, beside the frozen weights that they have already"""
        peft = _import_peft()
        targets = ALL_LINEAR if config.targets == (ALL_LINEAR,) else list(config.targets)
        self.peft_config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=targets,
            lora_dropout=0.0,  # trainer and engine must compute the same log-probs
            task_type="CAUSAL_LM",
            base_model_name_or_path=model_name,
        )
        _refuse_other_targets(model, config)
        # the same adapters on every rank, and in every start of a run
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(self.peft_config, model, adapter_name=_NAME)
        self.layers: list[Any] = [module for module in model.modules() if is_adapted(module)]
        self._refuse_other_layers()
        for layer in self.layers:
            # autocast rounds the input once, for base layer and adapter
            layer.cast_input_dtype_enabled = False
            for part in adapter_of(layer):
                part.data = _widened(part.data)  # PEFT gives them the dtype of the frozen weights

    def _refuse_other_layers(self) -> None:
        """Refuse adapters of layers that are not nn.Linear, which could not be merged."""
        own = {part for layer in self.layers for part in adapter_of(layer)}
        if own != {each for each in self.model.parameters() if each.requires_grad}:
            model = type(self.model).__name__
            raise ConfigError(
                f"[model.lora] supports linear layers (nn.Linear) only, and PEFT would adapt other "
                f"layers of {model}: name its linear layers in model.lora.targets, or train the "
                "whole model."
            )

    def published_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what engines load with every update."""
        if not self.published_alone:
            yield from self.merged_weights()
            return
        for name, parameter in self.named_parameters():
            yield name, full_tensor(parameter.detach())

    def frozen_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights beside adapters, by the names of the model without adapters."""
        trained = {name for name, _ in self.named_parameters()}
        for name, parameter in self.model.named_parameters():
            if name not in trained:
                yield name.replace(_BASE, ""), full_tensor(parameter.detach())
        for name, layer in quantized_layers(self.model).items():
            yield f"{name.removesuffix(_BASE)}.weight", layer.weight

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the equivalent model without adapters, by its names."""
        layers = {name: module for name, module in self.model.named_modules() if is_adapted(module)}
        trained = {name for name, _ in self.named_parameters()}
        for name, parameter in self.model.named_parameters():
            owner, _, kind = name.rpartition(_BASE)
            if owner in layers and kind == ".weight":
                yield owner + kind, merged_weight(layers[owner])
            elif name not in trained:
                yield owner + kind, full_tensor(parameter.detach())
        for name, layer in quantized_layers(self.model).items():
            owner = name.removesuffix(_BASE)
            yield f"{owner}.weight", merged_weight(layers.get(owner, layer))

    def merged_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the float32 state dict of the equivalent model; tied weights once.

        One tensor at a time: all of them need more memory than the model itself.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in self.model.state_dict().items():
            if name not in parameters:
                yield name, value
        for name, weight in self.merged_weights():
            yield name, _widened(weight)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the adapters' own parameters, by their names in the model."""
        own = {part for layer in self.layers for part in adapter_of(layer)}
        for name, parameter in self.model.named_parameters():
            if parameter in own:
                yield name, parameter

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapters alone in PEFT's format; default: the current ones."""
        if tensors is None:
            tensors = {name: full_tensor(part.detach()) for name, part in self.named_parameters()}
        self.peft_config.save_pretrained(folder)
        tensors = {_file_name(name): each.cpu().contiguous() for name, each in tensors.items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load adapters that `save` or PEFT wrote."""
        file = folder / WEIGHTS_FILE
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"The adapters in {file} can't be read: {error}.") from error
        own = {_file_name(name): parameter for name, parameter in self.named_parameters()}
        if {k: v.shape for k, v in tensors.items()} != {k: v.shape for k, v in own.items()}:
            raise ConfigError(
                f"The adapters in {file} belong to another model, rank or choice of layers: set "
                "model.name and [model.lora] as in the run that wrote them."
            )
        for name, parameter in own.items():
            parameter.copy_(tensors[name])

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute with the frozen weights alone.

        PEFT's own switch also changes `requires_grad`, which FSDP reads when it first gathers the
        parameters.
        """
        for layer in self.layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer._disable_adapters = False


def is_adapted(layer: Any) -> bool:
    """Whether this is a linear layer with an adapter; its weights may be quantized."""
    base = getattr(layer, "base_layer", None)
    return type(base) in _LINEAR and _NAME in getattr(layer, "lora_A", ())


def is_linear(layer: Any) -> bool:
    """Whether a layer is a plain matrix product, with or without an adapter."""
    return type(layer) in _LINEAR or is_adapted(layer)


def merged_weight(layer: Any) -> Tensor:
    """Return the full weight of a linear layer; an adapter is merged in float32."""
    weight = full_tensor(layer.weight.detach())  # of an adapted layer, the frozen one
    if not is_adapted(layer):
        return weight
    weight = _widened(weight)
    down, up = (full_tensor(part.detach()).to(weight.dtype) for part in adapter_of(layer))
    return torch.addmm(weight, up, down, alpha=scale_of(layer))


def _widened(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def frozen_layer(layer: Any) -> Any:
    """Return the layer that has an adapter beside it; any other layer is returned as it is."""
    return layer.base_layer if is_adapted(layer) else layer


def scale_of(layer: Any) -> float:
    """Return what the output of an adapter is multiplied by."""
    return layer.scaling[_NAME]


def adapter_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A [rank, in] and B [out, rank] of an adapted layer."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


def _file_name(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def _refuse_other_targets(model: Any, config: LoraConfig) -> None:
    """Refuse a target that does not exist, or is not a linear layer of the decoder."""
    if config.targets == (ALL_LINEAR,):
        return
    head = model.get_output_embeddings()
    inside = {name: m for name, m in model.named_modules() if type(m) in _LINEAR and m is not head}
    for target in config.targets:
        found = [
            (name, module)
            for name, module in model.named_modules()
            if name == target or name.endswith(f".{target}")
        ]
        if not found or any(name not in inside for name, _ in found):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
            raise ConfigError(
                f"model.lora.targets has {target!r}, which is not the name of linear layers that "
                f"can have adapters: choose from {known}."
            )


def _import_peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"[model.lora] needs the package peft ({error}): pip install 'trustbatch[lora]'."
        ) from error
