"""Errors of the machine: a full disk, too many open files, no memory, each as a sentence.

What says that memory ran out is known here too.
"""

import errno
import os
import re

from trustbatch.errors import first_line

_OTHER_FOLDER = "or choose a folder on another disk"
_ADVICE = {
    errno.ENOSPC: f"free disk space, {_OTHER_FOLDER}",
    errno.EDQUOT: f"free disk space within your quota, {_OTHER_FOLDER}",
    errno.EFBIG: f"raise the limit of a file's size (ulimit -f), {_OTHER_FOLDER}",
    errno.EROFS: "make the disk writable, or choose a folder on another one",
    errno.EACCES: "give yourself the right to it, or choose another folder",
    errno.EPERM: "give yourself the right to it, or choose another folder",
    errno.EIO: f"check the disk (dmesg), {_OTHER_FOLDER}",
    errno.EMFILE: "raise the limit of open files, such as with ulimit -n 4096",
    errno.ENFILE: "end other processes, since all together have too many files open",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or end others",
    errno.ENOMEM: "end other processes, or use a machine with more memory",
}
"""what to change, by the number of the error"""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""how a library in Rust, such as safetensors, quotes the number"""
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
    "cannot allocate memory",
    "failed to map segment",
)
"""parts of the messages of libraries that raise a plain RuntimeError or ImportError"""
_OUT_OF_FILES = "Too many open files"
_OUT_OF_THREADS = "can't start new thread"


def is_shortage(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    return isinstance(error, RuntimeError | ImportError) and any(
        words in str(error) for words in _OUT_OF_MEMORY
    )


def advice_on(error: BaseException) -> str | None:
    """Return what to change about the disk or the limits of a process, if that is the error."""
    return _ADVICE.get(_number_of(error))


def explain(error: BaseException) -> str | None:
    """Return what is wrong with the machine and what to change; None if it is something else."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # Ray's wrapper of an error in another process
        return explain(cause)
    again = "then give the same command again, which continues where this one stopped."
    if advice := advice_on(error):
        name = getattr(error, "filename", None)
        where = f"{name}: " if name else ""
        return f"{where}{os.strerror(_number_of(error))}: {advice}; {again}"
    if is_shortage(error):
        return (
            f"Memory ran out ({first_line(error)}): end other processes, use a machine with more "
            "memory, or lower training.micro_batch_tokens, rollout.max_sequences or "
            f"rollout.max_tokens; {again}"
        )
    return None


def _number_of(error: BaseException) -> int:
    """Return the system's number of an error; 0 if it has none."""
    if isinstance(error, OSError):
        return error.errno or 0
    if found := _OS_ERROR.search(str(error)):
        return int(found[1])
    if isinstance(error, ImportError) and _OUT_OF_FILES in str(error):
        return errno.EMFILE
    if isinstance(error, RuntimeError) and _OUT_OF_THREADS in str(error):
        return errno.EAGAIN
    return 0
