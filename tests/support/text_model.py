"""A random model whose tokenizer merges bytes, has a chat template, and decodes to real text."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CORPUS = (
    "What is the sum of twelve and thirty four? The answer is forty six.",
    "She sells sea shells by the sea shore; the shells she sells are sea shells for sure.",
    "A naïve café owner paid 12.50 € for three jalapeños and a piñata.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 34))\n",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_text_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a model of 150 tokens, neither flat nor certain, whose head is its own."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>"]
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=150, special_tokens=special, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], pad_token=special[0], model_max_length=256
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.25,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
