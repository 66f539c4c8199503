"""Output for a terminal: a line that is rewritten in place, and untrusted text made safe to print."""

import shutil
import sys
import unicodedata
from typing import TextIO

_CONTROL_PICTURES = 0x2400
"""first of the Unicode symbols that depict the control characters 0 to 31"""


class LiveLine:
    """A line that is rewritten in place on a terminal; elsewhere every text gets its own line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to `stream` (default: stderr)."""
        self.stream = stream if stream is not None else sys.stderr
        self.is_live = self.stream.isatty()

    def show(self, text: str, *, last: bool = False) -> None:
        """Replace the line; after the `last` text the next output starts on a new line."""
        if self.is_live and not last:
            # a line that wraps could not be erased
            text = text[: shutil.get_terminal_size().columns - 1]
        start = "\r\x1b[2K" if self.is_live else ""
        end = "\n" if last or not self.is_live else ""
        self.stream.write(f"{start}{text}{end}")
        self.stream.flush()


def plain_line(text: str) -> str:
    """Return one line in which control and formatting characters are visible, not executed.

    A terminal would execute an escape sequence in an error message or a quoted completion.
    """
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    code = ord(character)
    return chr(_CONTROL_PICTURES + code) if code < 32 else "\N{REPLACEMENT CHARACTER}"
