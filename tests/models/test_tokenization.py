"""Texts of completions: by the tokenizers library at once, or as transformers decodes them."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from trustbatch.models.tokenization import decode_all

WORDS = ["<end>", "Hello", "world", ".", "don", "'s", " ", "é"]


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that does something of its own to what the library decodes."""

    def _decode(self, *arguments: Any, **keywords: Any) -> str:
        return super()._decode(*arguments, **keywords).upper()


def build(kind: type[PreTrainedTokenizerFast], *, cleans_up: bool) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    words.decoder = decoders.WordPiece(cleanup=False)  # words with a space between them
    return kind(tokenizer_object=words, eos_token=WORDS[0], clean_up_tokenization_spaces=cleans_up)


@pytest.mark.parametrize(
    ("kind", "cleans_up", "expected"),
    [
        (PreTrainedTokenizerFast, False, ["Hello world .", "don 's é", ""]),
        (PreTrainedTokenizerFast, True, ["Hello world.", "don's é", ""]),
        (Shouting, False, ["HELLO WORLD .", "DON 'S É", ""]),
    ],
)
def test_texts_are_those_of_the_tokenizer(
    kind: type[PreTrainedTokenizerFast], cleans_up: bool, expected: list[str]
) -> None:
    tokenizer = build(kind, cleans_up=cleans_up)
    completions = [torch.tensor(ids) for ids in ([1, 2, 3, 0], [4, 5, 0, 7], [0])]
    texts = decode_all(tokenizer, completions)
    assert texts == expected
    assert texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    assert decode_all(tokenizer, [ids.tolist() for ids in completions]) == expected


def test_an_own_decode_is_used() -> None:
    class Own(PreTrainedTokenizerFast):
        def decode(self, *arguments: Any, **keywords: Any) -> Any:
            return ["own"]

    completions = [torch.tensor([1])]
    assert decode_all(build(Own, cleans_up=False), completions) == ["own"]
