"""Checkpoints of Qwen3's shapes with random weights, whose completions never end by themselves."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, UNKNOWN, NEVER = "<pad>", "<unknown>", "<never>"
"""NEVER is the end of a sequence: its id is one past the model's last logit, so none samples it"""
SCALE = 0.02
"""standard deviation of random weights, as Qwen3's config has it"""
FIRST_CHARACTER = 0x20000
"""code points from here on are one token each; they are valid, named or not"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the size of a Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int = 151_936
    is_tied: bool = True
    """whether the output head is the embedding"""


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
    "8b": Shape(
        hidden=4096,
        intermediate=12288,
        layers=36,
        heads=32,
        key_value_heads=8,
        head_dim=128,
        is_tied=False,
    ),
    "14b": Shape(
        hidden=5120,
        intermediate=17408,
        layers=40,
        heads=40,
        key_value_heads=8,
        head_dim=128,
        is_tied=False,
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
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(_config(shape, context)).to(torch.bfloat16)
    _never_ends(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_outline(shape: Shape, folder: Path, *, context: int) -> None:
    """Write what a plan reads of a model: its config and its tokenizer, without weights."""
    config = _config(shape, context)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    build_tokenizer(shape.vocabulary).save_pretrained(folder)


def make_model(shape: Shape, *, context: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Return a model in bfloat16 in host memory, filled by the GPU if there is one.

    Large ones are made in seconds so; to write and read them would take minutes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(_config(shape, context)).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    # its buffers are computed, not stored
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # a norm
            else:
                values = torch.empty(parameter.shape, device=device, dtype=torch.bfloat16)
                parameter.copy_(values.normal_(0.0, SCALE, generator=generator))
    tokenizer = build_tokenizer(shape.vocabulary)
    _never_ends(model, tokenizer)
    return model.eval(), tokenizer


def _config(shape: Shape, context: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def _never_ends(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a model an end of sequences that it can't sample."""
    never_id = tokenizer.convert_tokens_to_ids(NEVER)
    assert never_id == model.config.vocab_size, "the end of a sequence must have no logit"
    assert model.generation_config is not None
    model.generation_config.eos_token_id = never_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id


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
