"""Tokens of a model: prompts encoded and padded, stop tokens, and comparison of vocabularies."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trustbatch.errors import ConfigError, TokenizerError, first_line
from trustbatch.types import Prompt


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Tokenize a prompt, through the chat template where the tokenizer has one."""
    return encode_text(
        tokenizer,
        _rendered(tokenizer, prompt),
        prompt_id=prompt.id,
        add_special_tokens=not tokenizer.chat_template,
    )


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Return the text of a prompt; a chat template writes the special tokens, too."""
    if prompt.chat.get("tools"):
        _refuse_without_tools(tokenizer)
    if not tokenizer.chat_template:
        earlier = [message["content"] for message in prompt.history]
        return "\n\n".join([*filter(None, [prompt.system]), *earlier, prompt.text])
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return str(
        tokenizer.apply_chat_template(
            [*system, *prompt.history, {"role": "user", "content": prompt.text}],
            add_generation_prompt=True,
            tokenize=False,
            **prompt.chat,  # a template ignores unknown arguments
        )
    )


def _refuse_without_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model that would never see its tools."""
    if not tokenizer.chat_template or "tools" not in str(tokenizer.chat_template):
        lacks = "has no chat template" if not tokenizer.chat_template else "has one without tools"
        raise ConfigError(
            "The task has tools, which a chat template shows to the model, and the tokenizer of "
            f"{tokenizer.name_or_path} {lacks}: choose a model that was made for tools, or "
            "describe them in the prompt's text."
        )


def count_prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[int | str]:
    """Return the number of tokens of each prompt, or why it can't be tokenized.

    All at once, which a fast tokenizer divides over the cores.
    """
    texts: list[str] = []
    failed: dict[int, str] = {}
    for number, prompt in enumerate(prompts):
        try:
            texts.append(_rendered(tokenizer, prompt))
            texts[-1].encode()
        except UnicodeEncodeError:
            failed[number], texts[-1] = "has a character that is half of a pair", ""
        except Exception as error:  # a template may raise anything
            failed[number] = f"fails in the model's chat template ({first_line(error)})"
            texts.append("")
    counts: list[int | str] = []
    try:
        counts += map(len, _encode_all(tokenizer, texts))
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises plain Exception
            raise
        counts += [_count_one(tokenizer, text) for text in texts]
    return [failed.get(number, count) for number, count in enumerate(counts)]


def _encode_all(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        add_special_tokens=not tokenizer.chat_template,
        return_attention_mask=False,
        verbose=False,  # about texts that are longer than the context
    )
    return encoded["input_ids"]


def _count_one(tokenizer: PreTrainedTokenizerBase, text: str) -> int | str:
    try:
        return len(_encode_all(tokenizer, [text])[0])
    except Exception as error:
        if type(error) is not Exception:
            raise
        return f"has a character for which the model has no token ({first_line(error)})"


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    prompt_id: str,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """Tokenize a text of a prompt or of its episode."""
    try:
        text.encode()  # half of a pair of characters is a TypeError of the library
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:
        # the tokenizers library raises plain Exception
        if type(error) not in (Exception, UnicodeEncodeError):
            raise
        raise TokenizerError(
            f"The tokenizer of {tokenizer.name_or_path} can't encode prompt {prompt_id!r}: it has "
            f"no token for some character ({first_line(error)}): leave the prompt out, or choose "
            "another model."
        ) from error


def decode_all(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[Tensor | Sequence[int]]
) -> list[str]:
    """Return the texts of completions, without special tokens; by all cores where that is possible.

    `batch_decode` calls the tokenizers library once for each of them.
    """
    if not _decodes_alone(tokenizer):
        # of lists it would look at every number, which takes longer than decoding them
        sequences: Any = list(token_ids)  # which its annotation leaves out
        return tokenizer.batch_decode(sequences, skip_special_tokens=True)
    numbers = [ids.tolist() if isinstance(ids, Tensor) else [*ids] for ids in token_ids]
    return tokenizer.backend_tokenizer.decode_batch(numbers, skip_special_tokens=True)


def _decodes_alone(tokenizer: PreTrainedTokenizerBase) -> TypeGuard[PreTrainedTokenizerFast]:
    """Whether the text is what the tokenizers library says, with nothing done to it afterwards."""
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        and type(tokenizer).decode is PreTrainedTokenizerFast.decode
        and not tokenizer.clean_up_tokenization_spaces
    )


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
