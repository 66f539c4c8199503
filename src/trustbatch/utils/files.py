"""Writing files so that a kill leaves no partial content, and locking folders between processes."""

import os
from pathlib import Path
from typing import TextIO

from trustbatch.errors import ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system: folders are not locked there
    fcntl = None

_UMASK = os.umask(0o077)  # it can be read only by setting it: here, before there are threads
os.umask(_UMASK)


def write_atomically(file: Path, text: str) -> None:
    """Replace a file in one operation: a kill leaves the old content or the new, never a part."""
    partial = file.with_name(f".{file.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def apply_umask(path: Path) -> None:
    """Give a file, or all files below a folder, the permissions that new files have.

    safetensors makes files that only their owner can read.
    """
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    for file in files:
        file.chmod(0o666 & ~_UMASK)


def fsync(path: Path) -> None:
    """Wait until a file or folder is on the disk, so that a later rename cannot overtake it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path, *, in_use: str) -> TextIO:
    """Lock a folder against other processes until the returned file is closed or the process ends.

    A process that finds the folder locked gets a ConfigError with the message `in_use`.
    """
    file = (folder / ".lock").open("w")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(in_use) from None
    return file
