"""Checkpoints of Qwen3's shapes with random weights, whose completions never end by themselves."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, UNKNOWN, NEVER = "<pad>", "<unknown>", "<never>"
"""NEVER is the end of a sequence: its id is one past the model's last logit, so none samples it"""
FIRST_CHARACTER = 0x20000
"""code points from here on are one token each; they are valid, named or not"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the size of a Qwen3; embeddings are tied."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int = 151_936


SHAPES = {
    "0.6b": Shape(
        hidden=1024, intermediate=3072, layers=28, heads=16, key_value_heads=8, head_dim=128
    ),
    "1.7b": Shape(
        hidden=2048, intermediate=6144, layers=28, heads=16, key_value_heads=8, head_dim=128
    ),
    "4b": Shape(
        hidden=2560, intermediate=9728, layers=36, heads=32, key_value_heads=8, head_dim=128
    ),
    "tiny": Shape(
        hidden=64,
        intermediate=128,
        layers=2,
        heads=4,
        key_value_heads=2,
        head_dim=16,
        vocabulary=512,
    ),
}
"""by the name of the Qwen3 that has it; "tiny" shows on a CPU that a script runs"""


def make_checkpoint(shape: Shape, folder: Path, *, context: int) -> None:
    """Write a model in bfloat16, as Qwen3 is published, and its tokenizer; a no-op if it exists."""
    if (folder / "tokenizer_config.json").is_file():  # written last
        return
    tokenizer = build_tokenizer(shape.vocabulary)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    never_id = tokenizer.convert_tokens_to_ids(NEVER)
    assert never_id == shape.vocabulary, "the end of a sequence must have no logit"
    model.generation_config.eos_token_id = never_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `size` tokens, one a character, that can also read plain ASCII."""
    special = [PAD, UNKNOWN]
    ascii_text = [chr(code) for code in range(0x20, 0x7F)]
    rest = [chr(FIRST_CHARACTER + i) for i in range(size - len(special) - len(ascii_text))]
    vocabulary = {token: number for number, token in enumerate([*special, *ascii_text, *rest])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=NEVER,
        clean_up_tokenization_spaces=False,
    )
