"""Token ids from the strings of tokens, for responses that have no ids."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

REPLACED = "\N{REPLACEMENT CHARACTER}".encode()
"""what engines write for a part of a character"""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""how SentencePiece writes a byte"""


class TokenStrings:
    """The ids of a vocabulary by the bytes that they stand for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        is_byte_level = _is_byte_level(tokenizer)
        added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
        self._ids: dict[bytes, list[int]] = defaultdict(list)
        for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            content = (
                added[index].encode()
                if index in added
                else (_from_byte_level(token) if is_byte_level else _from_pieces(token))
            )
            self._ids[content].append(index)

    def ids(self, strings: Sequence[bytes], text: str | None) -> tuple[int, ...] | str:
        """Return one id for each string, or why there is none that is certain.

        Where several tokens have the same bytes, the text's own encoding decides.
        """
        found = [self._ids.get(each, []) for each in strings]
        for position, (string, ids) in enumerate(zip(strings, found, strict=True)):
            if not ids:
                shown = string.decode("utf-8", errors="replace")
                part = " is a part of a character and" if REPLACED in string or not string else ""
                return f"token {position} ({shown!r}){part} has no id in this vocabulary"
        if all(len(ids) == 1 for ids in found):
            return tuple(ids[0] for ids in found)
        whole = b"".join(strings).decode("utf-8", errors="replace") if text is None else text
        encoded = self._tokenizer.encode(whole, add_special_tokens=False)
        if len(encoded) >= len(found):
            encoded = encoded[: len(found)]
        if len(encoded) == len(found) and all(
            index in ids for index, ids in zip(encoded, found, strict=True)
        ):
            return tuple(encoded)
        position = next(number for number, ids in enumerate(found) if len(ids) > 1)
        shown = strings[position].decode("utf-8", errors="replace")
        return f"token {position} ({shown!r}) is one of the ids {found[position]}"


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer writes bytes as the printable characters of GPT-2."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))


def _printable_bytes() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTE_OF = _printable_bytes()


def _from_byte_level(token: str) -> bytes:
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _from_pieces(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
