"""Files of a folder that survives kills, and that one process at a time writes to."""

from pathlib import Path
from typing import TextIO

from trustbatch.errors import ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing guards the folder there
    fcntl = None


def write_whole(file: Path, text: str) -> None:
    """Replace a file in one go: a kill leaves the old content or the new, never a part."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def lock_folder(folder: Path, *, in_use: str) -> TextIO:
    """Keep other processes out of a folder until the file is closed or the process ends.

    `in_use` is the sentence for them.
    """
    file = (folder / ".lock").open("w")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(in_use) from None
    return file
