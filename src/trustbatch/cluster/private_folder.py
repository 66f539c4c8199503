"""The folder of a Ray of our own: its sockets, its logs and the token that its processes show.

Only this user can enter it, and it goes with the run. After an error the run folder has the logs.
"""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trustbatch.errors import EngineError

PREFIX = "trustbatch-ray-"
LONGEST_PARENT = 40
"""characters: a socket's path has at most 107, and Ray's own part of it is long"""
TOKEN = "token"
LOGS = "ray-logs"
"""in the run folder, after an error"""
AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
REMOVAL_SECONDS = 10.0
"""in which Ray's processes end once they are killed"""


@contextmanager
def private_folder(run: Path) -> Iterator[Path]:
    """Make the folder and the token of a Ray that is started inside; both end with it."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_PARENT:
        parent = Path("/tmp")
    for leftover in parent.glob(f"{PREFIX}*-*"):
        if _is_of_dead_process(leftover):
            end_private_ray(leftover)
    # only this user may enter it
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        with _own_token(folder / TOKEN):
            yield folder
    except EngineError as error:
        kept = keep_logs(folder, run)
        if kept is None:
            raise
        raise type(error)(f"{str(error).rstrip('.')} (Ray's logs: {kept}).") from error
    finally:
        end_private_ray(folder)


def end_private_ray(folder: Path) -> None:
    """Kill the processes that have the folder's token, and remove the folder."""
    token = f"{folder / TOKEN}\0".encode()
    deadline = time.monotonic() + REMOVAL_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it may end during the scan
                if token in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _is_of_dead_process(folder: Path) -> bool:
    pid = folder.name.removeprefix(PREFIX).partition("-")[0]
    is_ours = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    return is_ours and pid.isdecimal() and not Path(f"/proc/{pid}").exists()


@contextmanager
def _own_token(file: Path) -> Iterator[None]:
    """Have Ray require a token that is made for this run, whatever the user's own clusters do."""
    before = {name: os.environ.pop(name) for name in AUTHENTICATION if name in os.environ}
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    _read_again()
    try:
        yield
    finally:
        for name in AUTHENTICATION:
            os.environ.pop(name, None)
        os.environ |= before
        _read_again()


def _read_again() -> None:
    """Make a Ray that is imported already read mode and token again; before 2.52 it has none."""
    raylet = sys.modules.get("ray._raylet")
    if raylet is not None and hasattr(raylet, "AuthenticationTokenLoader"):
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def keep_logs(folder: Path, run: Path) -> Path | None:
    """Copy the logs into the run folder, if there is one; returns where they are."""
    logs = next(iter(folder.glob("session_*/logs")), None)
    if logs is None or not run.is_dir():
        return None
    kept = run / LOGS
    try:
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(logs, kept, ignore_dangling_symlinks=True)
    except (OSError, shutil.Error):  # no room for them: the error itself matters more
        return None
    return kept
