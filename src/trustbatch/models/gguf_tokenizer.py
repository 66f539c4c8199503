"""The tokenizer of a GGUF file: byte-level BPE, as in Llama 3, Qwen and SmolLM2."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from trustbatch.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4
"""token types: control tokens such as <|im_end|>, and text that is never split such as <think>"""

_WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF_QWEN2 = _WORDS_OF_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# name in the file: regex that splits text before merging, and whether GPT-2's split follows
WORDS: dict[str, tuple[str | None, bool]] = {
    "default": (None, True),
    "gpt-2": (None, True),
    "smollm": (r"\p{N}", True),
    "qwen2": (_WORDS_OF_QWEN2, False),
    "deepseek-r1-qwen": (_WORDS_OF_QWEN2, False),
    "llama-bpe": (_WORDS_OF_LLAMA3, False),
}


def build_tokenizer(fields: Mapping[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer that the fields of the file at `path` describe."""
    kind, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or words not in WORDS:
        raise ConfigError(
            f"{path} has a tokenizer of kind {kind!r} ({words!r}), which can't be rebuilt exactly: "
            f"choose a file of kind 'gpt2' with {', '.join(WORDS)}, or a Hugging Face folder."
        )
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ConfigError(
            f"{path} has no vocabulary: it is damaged or unfinished, so create it again."
        )
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            # neither part contains a space, which byte-level BPE writes as another letter
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    if "qwen" in words:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(*WORDS[words])
    backend.decoder = decoders.ByteLevel()
    _add_whole_tokens(backend, tokens, fields.get("tokenizer.ggml.token_type", []))
    special = {
        name: tokens[fields[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    bos = special.get("bos_token")
    if bos and fields.get("tokenizer.ggml.add_bos_token", words == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def end_token_ids(
    tokenizer: PreTrainedTokenizerFast, fields: Mapping[str, Any], path: Path
) -> list[int]:
    """Return the stop tokens: end of text, and end of the assistant's turn."""
    ends = [
        fields.get("tokenizer.ggml.eos_token_id"),
        fields.get("tokenizer.ggml.eot_token_id"),
        _end_of_turn(tokenizer, path) if tokenizer.chat_template else None,
    ]
    return list(dict.fromkeys(int(end) for end in ends if end is not None))


def _end_of_turn(tokenizer: PreTrainedTokenizerFast, path: Path) -> int | None:
    """Return the special token that the chat template writes after an answer."""
    answer = "46"
    turns = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError as error:
        raise ConfigError(
            f"The chat template of {path} can't be used ({error}): choose another file, or a "
            "Hugging Face folder."
        ) from error
    rest = tokenizer.encode(str(text).rpartition(answer)[2], add_special_tokens=False)
    first = tokenizer.added_tokens_decoder.get(rest[0]) if rest else None
    return rest[0] if first is not None and first.special else None


def _pre_tokenizer(words: str | None, splits_as_gpt2: bool) -> pre_tokenizers.PreTokenizer:
    into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_as_gpt2)
    if words is None:
        return into_bytes
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), into_bytes])


def _add_whole_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Declare the tokens that are never split; they keep their ids."""
    kinds = list(zip(tokens, types, strict=False))
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in kinds if kind == CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in kinds if kind == USER_DEFINED]
    )
