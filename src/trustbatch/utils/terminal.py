"""Terminal output: a line that is rewritten in place, and untrusted text made safe to print."""

import shutil
import sys
import unicodedata
from enum import IntEnum
from typing import TextIO

_CONTROL_PICTURES = 0x2400
"""first of the Unicode symbols that depict the control characters 0 to 31"""


class Verbosity(IntEnum):
    """How much a command says: warnings and its last line, the usual, or everything."""

    QUIET = 0
    USUAL = 1
    VERBOSE = 2


_verbosity = Verbosity.USUAL


def set_verbosity(verbosity: Verbosity) -> None:
    """Decide how much this process says from now on."""
    global _verbosity
    _verbosity = verbosity


def is_quiet() -> bool:
    """Whether only warnings and the last line of a command are shown."""
    return _verbosity == Verbosity.QUIET


def is_verbose() -> bool:
    """Whether everything is shown, tracebacks included."""
    return _verbosity == Verbosity.VERBOSE


class LiveLine:
    """A line that is rewritten in place on a terminal; elsewhere every text gets its own line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to `stream` (default: stderr)."""
        self.stream = stream if stream is not None else sys.stderr
        self.is_live = self.stream.isatty()

    def show(self, text: str, *, last: bool = False) -> None:
        """Replace the line; after the `last` text the next output starts on a new line."""
        if not is_quiet():
            self._write(text, last=last)

    def warn(self, text: str) -> None:
        """Show a line of its own that a quiet command shows too."""
        self._write(text, last=True)

    def _write(self, text: str, *, last: bool) -> None:
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
