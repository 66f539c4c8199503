"""The checkpoints of cpu_step.py: random models that never end a completion."""

from pathlib import Path

import torch
from step_workload import SEED
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trustbatch.models.tiny import PAD_TOKEN, TINY_VOCABULARY, build_model, build_tokenizer

SMALL_VOCABULARY = 4096
NEVER = "<never>"
"""the end-of-sequence token: its id is one past the model's last logit, so it is never sampled"""


def make_checkpoint(size: str, folder: Path) -> int:
    """Write a random Qwen3 that never ends a completion; returns its number of parameters."""
    tokenizer = build_tokenizer() if size == "tiny" else build_small_tokenizer()
    model = build_model(tokenizer, SEED) if size == "tiny" else build_small_model(tokenizer)
    tokenizer.add_special_tokens({"eos_token": NEVER})
    never_id = tokenizer.convert_tokens_to_ids(NEVER)
    assert never_id == model.config.vocab_size, "the end of sequence must have no logit"
    model.config.eos_token_id, model.generation_config.eos_token_id = None, never_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def build_small_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tiny character tokenizer, its vocabulary filled up with single characters."""
    characters = [token for token in TINY_VOCABULARY if len(token) == 1]
    fill = [chr(0x4E00 + i) for i in range(SMALL_VOCABULARY - 1 - len(characters))]
    vocabulary = {token: i for i, token in enumerate([PAD_TOKEN, *characters, *fill])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD_TOKEN)


def build_small_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a random float32 Qwen3 of 4.2 million parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(config).float()
