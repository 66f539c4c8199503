"""Tokens of a model: prompts encoded and padded, stop tokens, and comparison of vocabularies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trustbatch.errors import ConfigError, first_line
from trustbatch.types import Prompt


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Tokenize a prompt, through the chat template where the tokenizer has one."""
    if tokenizer.chat_template:
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        text = tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": prompt.text}],
            add_generation_prompt=True,
            tokenize=False,
            **prompt.chat,  # a template ignores unknown arguments
        )
        # the template has already written the special tokens
        return encode_text(tokenizer, str(text), prompt_id=prompt.id, add_special_tokens=False)
    text = f"{prompt.system}\n\n{prompt.text}" if prompt.system else prompt.text
    return encode_text(tokenizer, text, prompt_id=prompt.id)


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    prompt_id: str,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Tokenize a text of a prompt or of its episode."""
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises plain Exception
            raise
        raise ConfigError(
            f"The tokenizer of {tokenizer.name_or_path} can't encode prompt {prompt_id!r}: it has "
            f"no token for some character ({first_line(error)}): leave the prompt out, or choose "
            "another model."
        ) from error


def pad_left(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return prompts as rows padded on the left [P, L], and an attention mask of the same shape."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=pad_token_id, padding_side="left"
    )
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    from_end = ids.shape[1] - torch.arange(ids.shape[1])
    return ids, (from_end[None, :] <= lengths[:, None]).long()


def positions_of(mask: Tensor) -> Tensor:
    """Return the position of each token [B, L] of rows padded on the left; that of padding is 0."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def stop_token_ids_of(model: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[int, ...]:
    """Return the tokens that end a completion, of tokenizer and generation config."""
    generation_config = getattr(model, "generation_config", None)
    configured = getattr(generation_config, "eos_token_id", None)
    ids = list(configured) if isinstance(configured, list | tuple) else [configured]
    found = dict.fromkeys(int(i) for i in [tokenizer.eos_token_id, *ids] if i is not None)
    if not found:
        raise ConfigError(
            f"The tokenizer of {name!r} has no end-of-sequence token, so a completion could never "
            "stop: set eos_token in its tokenizer_config.json."
        )
    return tuple(found)


def refuse_other_vocabulary(
    second: PreTrainedTokenizerBase, trained: PreTrainedTokenizerBase, *, name: str
) -> None:
    """Refuse a tokenizer whose vocabulary differs, special tokens included."""
    own, wanted = second.get_vocab(), trained.get_vocab()
    if own == wanted:
        return
    differing = {token for token, _ in own.items() ^ wanted.items()}
    first = min(differing, key=lambda token: (wanted.get(token, own.get(token, 0)), token))
    raise ConfigError(
        f"The second policy {name!r} has another vocabulary than the trained model: choose a model "
        f"with the same tokenizer ({first!r} is {_id(own, first)} there and {_id(wanted, first)} "
        f"here, the first of {len(differing)} that differ)."
    )


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "absent"
