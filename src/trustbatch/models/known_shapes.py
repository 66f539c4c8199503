"""Shapes of models that studies name, so that a run can be planned without the hub."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_QWEN3_4B = _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
_QWEN3_8B = _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
_QWEN25: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_QWEN25_05B = _QWEN25 | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
_QWEN25_15B = _QWEN25 | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
KNOWN_MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen/Qwen3-4B-Thinking-2507": (Qwen3Config, _QWEN3_4B),
    "Qwen/Qwen3-8B": (Qwen3Config, _QWEN3_8B),
    "Qwen/Qwen3-8B-Base": (Qwen3Config, _QWEN3_8B),
    "Qwen/Qwen2.5-1.5B": (Qwen2Config, _QWEN25_15B),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (Qwen2Config, _QWEN25_05B),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": (Qwen2Config, _QWEN25_15B),
}


def known_config(name: str) -> PreTrainedConfig | None:
    """Return the config of a model on the hub as far as memory depends on it, if it is known."""
    if name not in KNOWN_MODELS or Path(name).is_dir():
        return None
    kind, shape = KNOWN_MODELS[name]
    return kind(**shape)
