"""What ends a run whose Ray has died: `python -m trustbatch.cluster.keeper RUN FOLDER PID=NAME ...`

Without its raylet or its GCS, Ray ends the process of a run from within, where nothing can be said
or cleaned up any more. So a process of its own waits for the end of both, and of the run. It says
what has happened, and removes what is left, also of a run that was killed.
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trustbatch.cluster.private_folder import AUTHENTICATION, end_private_ray, keep_logs
from trustbatch.observe.status import mark_failed
from trustbatch.utils.terminal import plain_line

SERVERS = {"raylet": "raylet", "gcs_server": "control service (gcs_server)"}
"""program, and its name in the sentence"""
GOODBYE = b"."
"""what a run writes to the keeper when it has ended in order"""
STDIN, STDOUT, STDERR = 0, 1, 2
EXIT_CODE = 2
MOMENT = 0.5
"""seconds after a run's end in which the death that caused it must show"""
SENTENCE_SECONDS = 20.0
"""in which the keeper says what has happened"""


@contextmanager
def kept(run: Path, folder: Path | None) -> Iterator[None]:
    """Have a keeper meanwhile; `folder` is that of a Ray of our own."""
    servers = _servers()
    # with Ray's token it would count as a process of Ray
    environment = {key: value for key, value in os.environ.items() if key not in AUTHENTICATION}
    keeper = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "trustbatch.cluster.keeper", str(run.absolute())),
            *(str(folder or ""), *(f"{pid}={name}" for pid, name in servers)),
        ],
        stdin=subprocess.PIPE,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C does not reach it
    )
    assert keeper.stdin is not None
    is_over, over = os.pipe()
    watched = [os.pidfd_open(pid) for pid, _ in servers]
    arguments = (keeper, watched, is_over)
    thread = threading.Thread(target=_end_with_servers, args=arguments, daemon=True, name="keeper")
    thread.start()
    try:
        yield
    finally:
        os.close(over)
        thread.join()
        for descriptor in (*watched, is_over):
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(GOODBYE)
            keeper.stdin.close()
        keeper.wait()


def _end_with_servers(keeper: subprocess.Popen[bytes], watched: list[int], is_over: int) -> None:
    """End this process once a server has ended, as Ray does it, but without what Ray prints."""
    ended, _, _ = select.select([*watched, is_over], [], [])
    if is_over in ended:
        return
    with open(os.devnull, "wb") as null:  # other threads print what Ray's processes log
        os.dup2(null.fileno(), STDOUT)
        os.dup2(null.fileno(), STDERR)
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(SENTENCE_SECONDS)
    os._exit(EXIT_CODE)


def _servers() -> list[tuple[int, str]]:
    """Return process and program of the servers of this machine's node."""
    import ray

    node = ray.get_runtime_context().get_node_id().encode()
    found: list[tuple[int, str]] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end during the scan
            command = (process / "cmdline").read_bytes()
            program = os.path.basename(command.partition(b"\0")[0]).decode(errors="replace")
            if program in SERVERS and node in command:
                found.append((int(process.name), program))
    return found


def main(arguments: list[str]) -> None:
    """Wait for the end of the run or of a server; then say what has ended, and clean up."""
    run, folder = Path(arguments[0]), Path(arguments[1]) if arguments[1] else None
    watched: dict[int, str] = {}
    dead: list[str] = []
    for argument in arguments[2:]:
        pid, _, name = argument.partition("=")
        try:
            watched[os.pidfd_open(int(pid))] = name
        except ProcessLookupError:
            dead.append(name)
    if not dead:
        ended, _, _ = select.select([STDIN, *watched], [], [])
        if STDIN in ended and os.read(STDIN, 1) == GOODBYE:
            return
        ended, _, _ = select.select(watched, [], [], MOMENT)
        dead = [watched[each] for each in ended]
    logs = None
    if folder is not None:
        logs = keep_logs(folder, run) if dead else None
        end_private_ray(folder)
    if dead:
        where = f" (its logs: {logs})" if logs else " in its logs"
        sentence = (
            f"Ray's {SERVERS[dead[0]]} has ended during the run: see why{where}, such as too "
            "little memory; the same command continues the run from its last checkpoint."
        )
        with contextlib.suppress(OSError, ValueError):  # there may be no status yet
            mark_failed(run, sentence)
        os.write(STDERR, f"error: {plain_line(sentence)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
