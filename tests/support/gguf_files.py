"""Small GGUF files, written with the package gguf from models with known weights.

The blocks are quantized and de-quantized here by their definition, one number at a time, so that
nothing of what is tested is used to test it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

BLOCK = 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "he", "ĊĊ", "[PAD]"]
MERGES = ["h e", "Ċ Ċ"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_model(kind: str, *, tied: bool) -> Any:
    """Return a random model of this architecture whose rows are whole blocks."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        # heads wider than the hidden size divided by their number, as Qwen3-0.6B has them
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def write_gguf(
    path: Path,
    kind: str,
    model: Any,
    *,
    quantization: str = "F32",
    fields: dict[str, Any] | None = None,
    chat: str | None = CHAT,
    leave_out: str = "",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write the model as llama.cpp would; matrices are stored in the given quantization."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if kind == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if kind == "llama" else "qwen2")
    writer.add_token_list(TOKENS)
    types = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [5]
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    # as base models have it: the chat template alone knows what ends a turn
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    if chat is not None:
        writer.add_chat_template(chat)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for name, value in (fields or {}).items():
        adders[type(value)](name, value)
    for name, values in tensors_of(model, kind).items():
        if leave_out and leave_out in name:
            continue
        if quantization == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
        elif quantization == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            stored = {"Q8_0": pack_q8_0, "Q4_1": pack_q4_1}[quantization](values)
            raw_type = gguf.GGMLQuantizationType[quantization]
            writer.add_tensor(name, stored, raw_dtype=raw_type)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(model: Any, kind: str) -> dict[str, np.ndarray]:
    """The model's tensors under their names in the file, in the file's order of rows."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            q, k = model.config.num_attention_heads, model.config.num_key_value_heads
            values = as_pairs(values, q if "q_proj" in name else k)
        for old, new in NAMES.items():
            name = name.replace(f"{old}.", f"{new}.")
        found[name.replace("model.layers.", "blk.")] = values
    return found


def as_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of each head become neighbors, one row at a time."""
    size = len(values) // heads
    half = size // 2
    rows = [
        h * size + i + part * half for h in range(heads) for i in range(half) for part in (0, 1)
    ]
    return values[rows]


def pack_q8_0(values: np.ndarray) -> np.ndarray:
    """Blocks of a half-precision scale and 32 signed bytes."""
    packed = bytearray()
    for block in values.reshape(-1, BLOCK):
        scale = np.float16(np.abs(block).max() / 127)
        packed += scale.tobytes()
        packed += np.rint(block / np.float32(scale)).clip(-127, 127).astype(np.int8).tobytes()
    return np.frombuffer(bytes(packed), np.uint8).reshape(len(values), -1)


def pack_q4_1(values: np.ndarray) -> np.ndarray:
    """Blocks of a scale, a minimum and 32 nibbles: the first half low, the second half high."""
    packed = bytearray()
    for block in values.reshape(-1, BLOCK):
        scale = np.float16((block.max() - block.min()) / 15)
        low = np.float16(block.min())
        packed += scale.tobytes() + low.tobytes()
        steps = np.rint((block - np.float32(low)) / np.float32(scale)).clip(0, 15)
        nibbles = [int(step) for step in steps]
        packed += bytes(nibbles[i] | nibbles[i + 16] << 4 for i in range(16))
    return np.frombuffer(bytes(packed), np.uint8).reshape(len(values), -1)


def unpack(values: np.ndarray, quantization: str) -> np.ndarray:
    """What a reader must find where `values` were stored."""
    if quantization == "F32":
        return values
    if quantization == "F16":
        return values.astype(np.float16).astype(np.float32)
    numbers = []
    if quantization == "Q8_0":
        for block in pack_q8_0(values).reshape(-1, 2 + BLOCK):
            scale = np.float32(block[:2].view(np.float16)[0])
            numbers += [scale * np.float32(step) for step in block[2:].view(np.int8)]
    else:
        for block in pack_q4_1(values).reshape(-1, 4 + BLOCK // 2):
            scale, low = np.float32(block[:4].view(np.float16))
            steps = [int(b) & 15 for b in block[4:]] + [int(b) >> 4 for b in block[4:]]
            numbers += [scale * np.float32(step) + low for step in steps]
    return np.array(numbers, np.float32).reshape(values.shape)
