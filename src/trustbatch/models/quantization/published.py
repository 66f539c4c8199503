"""Checkpoints that were published with quantized weights, read as they are.

The weights keep the codes and scales of their files, so that a run trains beside the same numbers
as in any other library. Nothing of bitsandbytes is needed to read its formats.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from trustbatch.errors import ConfigError
from trustbatch.models.quantization.formats import (
    FORMATS,
    INT8_MAX,
    NF4_BLOCK,
    Codes,
    nf4_levels,
    pack_halves,
)
from trustbatch.models.quantization.layer import QuantizedLinear

SUPPORTED = "bitsandbytes (NF4 in blocks of 64, and 8 bits) and FP8 in blocks of 128"
NF4_STATE = "quant_state.bitsandbytes__nf4"
NESTED_BLOCK = 256
"""scales with one scale of their own, where bitsandbytes quantizes the scales too"""
_AUTO_MODEL: Any = AutoModelForCausalLM  # its published types do not fit its own arguments
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def published_format(config: Any, name: str) -> str | None:
    """Return the format in which a model of the hub is quantized; None if it is not."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    settings: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_dict()
    method = settings.get("quant_method")
    is_bitsandbytes = method == "bitsandbytes"
    if is_bitsandbytes and settings.get("load_in_8bit"):
        return "int8"
    if is_bitsandbytes and settings.get("bnb_4bit_quant_type") == "nf4":
        return "nf4"
    if method == "fp8" and list(settings.get("weight_block_size") or []) == [128, 128]:
        return "fp8"
    raise ConfigError(
        f"model.name = {name!r} is quantized in a way that is not supported ({method}): choose one "
        f"with {SUPPORTED}, or the original model and model.quantization."
    )


def load_published(
    name: str, config: Any, device: torch.device, *, trust_remote_code: bool, offline: bool
) -> Any:
    """Load a quantized checkpoint; its layers to a device, one at a time, all else to the host."""
    kind = published_format(config, name)
    assert kind is not None
    del config.quantization_config
    with _import_accelerate().init_empty_weights(include_buffers=False):
        model = _AUTO_MODEL.from_config(
            config, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    files = _Tensors(name, offline)
    for owner, child, layer in list(_linears(model)):
        path = f"{owner}.{child}" if owner else child
        codes = _read_codes(files, path, kind, layer, device)
        if codes is not None:
            bias = files.read(f"{path}.bias").to(device) if layer.bias is not None else None
            setattr(model.get_submodule(owner), child, QuantizedLinear(codes, bias))
    _fill_plain(model, files)
    if model.can_generate():
        with suppress(OSError):  # it may have none
            model.generation_config = GenerationConfig.from_pretrained(
                name, local_files_only=offline
            )
    return model


class _Tensors:
    """The tensors of a checkpoint in safetensors, each read when it is asked for."""

    def __init__(self, name: str, offline: bool) -> None:
        options: dict[str, Any] = {"local_files_only": offline}
        index = cached_file(name, _INDEX, _raise_exceptions_for_missing_entries=False, **options)
        if index is None:
            paths = [str(cached_file(name, _WEIGHTS, **options))]
        else:
            shards: Any = get_checkpoint_shard_files(name, index, **options)
            paths = shards[0]
        self.files = [safe_open(path, framework="pt") for path in paths]
        self.file_of = {key: file for file in self.files for key in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def read(self, name: str) -> Tensor:
        """Return a tensor, in host memory."""
        if name not in self.file_of:
            raise ValueError(f"it has no tensor {name!r}")
        return self.file_of[name].get_tensor(name)


def _linears(model: nn.Module) -> Iterator[tuple[str, str, nn.Linear]]:
    for owner, module in model.named_modules():
        for child, layer in module.named_children():
            if type(layer) is nn.Linear:
                yield owner, child, layer


def _read_codes(
    files: _Tensors, path: str, kind: str, layer: nn.Linear, device: torch.device
) -> Codes | None:
    """Return the quantized weight of a layer; None if the layer was left as it is."""
    weight = f"{path}.weight"
    if kind == "nf4" and f"{weight}.{NF4_STATE}" in files:
        return _read_nf4(files, weight, layer, device)
    if kind == "int8" and f"{path}.SCB" in files:
        scales = files.read(f"{path}.SCB").float()[:, None] / INT8_MAX
        codes = files.read(weight).view(torch.uint8)
    elif kind == "fp8" and f"{weight}_scale_inv" in files:
        block = FORMATS[kind].block_of(layer.in_features)
        scales = files.read(f"{weight}_scale_inv").float().repeat_interleave(block, dim=0)
        scales = scales[: layer.out_features].contiguous()
        codes = files.read(weight).view(torch.uint8)
    else:
        return None
    return Codes(codes.to(device), scales.to(device), FORMATS[kind], layer.in_features)


def _read_nf4(files: _Tensors, weight: str, layer: nn.Linear, device: torch.device) -> Codes:
    state = json.loads(bytes(files.read(f"{weight}.{NF4_STATE}").tolist()))
    levels = files.read(f"{weight}.quant_map").float()
    if (
        state["blocksize"] != NF4_BLOCK
        or layer.in_features % NF4_BLOCK
        or not torch.equal(levels, nf4_levels(levels.device))
    ):
        raise ValueError(f"{weight!r} has other blocks or levels than {SUPPORTED}")
    scales = files.read(f"{weight}.absmax")
    if f"{weight}.nested_absmax" in files:
        if state["nested_blocksize"] != NESTED_BLOCK:
            raise ValueError(f"{weight!r} has scales in other blocks than {NESTED_BLOCK}")
        outer = files.read(f"{weight}.nested_absmax").repeat_interleave(NESTED_BLOCK)[: len(scales)]
        inner = files.read(f"{weight}.nested_quant_map")[scales.int()]
        scales = inner * outer + state["nested_offset"]
    # there, two neighbors are in a byte, the earlier one in its high half
    pairs = files.read(weight).view(torch.uint8).view(layer.out_features, -1).to(device)
    codes = pack_halves(torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1))
    scales = scales.float().view(layer.out_features, -1).to(device)
    return Codes(codes, scales, FORMATS["nf4"], layer.in_features)


def _fill_plain(model: Any, files: _Tensors) -> None:
    """Read the parameters that are not quantized."""
    model.tie_weights()  # so that tied ones are asked for once
    for path, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        value = files.read(path)
        if value.shape != parameter.shape or not value.is_floating_point() or value.itemsize == 1:
            raise ValueError(f"{path!r} is quantized in another way than {SUPPORTED}")
        owner, _, child = path.rpartition(".")
        kept = nn.Parameter(value.float(), requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(owner), child, kept)
    model.tie_weights()


def _import_accelerate() -> Any:
    try:
        return import_module("accelerate")
    except ImportError as error:
        raise ConfigError(
            f"A quantized checkpoint needs the package accelerate ({error}): "
            "pip install 'trustbatch[lora]'."
        ) from error
