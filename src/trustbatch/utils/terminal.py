"""Text that came from elsewhere, made harmless for a terminal."""

import unicodedata

_PICTURES = 0x2400


def plain_line(text: str) -> str:
    """Return one line in which control and formatting characters are seen, not obeyed.

    A terminal would take an escape sequence in an error message, or in a completion that it quotes,
    as a command.
    """
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    code = ord(character)
    return chr(_PICTURES + code) if code < 32 else "\N{REPLACEMENT CHARACTER}"
