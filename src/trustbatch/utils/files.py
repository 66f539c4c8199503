"""Files: written so that a kill leaves no partial content, hashed, and folders that are locked."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from trustbatch.errors import ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system: folders are not locked there
    fcntl = None

_UMASK = os.umask(0o077)  # it can be read only by setting it: here, before there are threads
os.umask(_UMASK)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Replace a file in one operation: a kill leaves the old content or the new, never a part."""
    partial = file.with_name(f".{file.name}")
    try:
        with naming(file):
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk its space is needed
        raise


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file in the errors of writing it, which know none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


class AppendedFile:
    """A file to which bytes are appended without a buffer.

    So a full disk raises its error where it is written to, and not once more when it is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, content: bytes) -> None:
        """Append all of it."""
        rest = memoryview(content)
        with naming(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Wait until all of it is on the disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close it."""
        self._file.close()


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, which is read piece by piece."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


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
