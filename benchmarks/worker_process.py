"""A benchmark's worker: a process of its own, with a log, a deadline, and results as JSON lines."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_END = 10.0
LOG_LINES_SHOWN = 25
PACKAGES = ("trustbatch", "torch", "transformers", "triton", "trl", "vllm", "liger-kernel", "peft")


@dataclass
class Results:
    """A file that several workers and their parent append JSON lines to; `run` tells runs apart."""

    file: Path
    run: str

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": self.run, **record}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all lines of this run."""
        if not self.file.is_file():
            return []
        whole = self.file.read_text(encoding="utf-8").rpartition("\n")[
            0
        ]  # a line may be incomplete
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["run"] == self.run]


def run_worker(
    name: str,
    arguments: Sequence[str],
    results: Results,
    *,
    seconds: float,
    show: Callable[[Mapping[str, Any]], str],
) -> str:
    """Run the script again with these arguments, and show the lines it adds as they come.

    Returns how it ended: "done", "out of memory", "failed" or "late", the last if it was stopped
    because `seconds` had passed. What it wrote to the terminal is in a log beside the results.
    """
    log = results.file.with_name(f"{results.file.stem}-{name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    num_shown = len(results.read())
    deadline = time.monotonic() + seconds
    ending = None
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [sys.executable, sys.argv[0], *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        while ending is None:
            status = process.poll()
            lines = results.read()
            for line in lines[num_shown:]:
                print(show(line), flush=True)
            num_shown = len(lines)
            if status is not None:
                ending = "failed" if status else "done"
            elif time.monotonic() > deadline:
                ending = "late"
            else:
                time.sleep(SECONDS_BETWEEN_LOOKS)
        _end(process)  # its child processes may still hold GPU memory
    if ending != "done":
        text = log.read_text(encoding="utf-8", errors="replace")
        if ending == "failed" and "out of memory" in text.lower():
            ending = "out of memory"
        tail = text.splitlines()[-LOG_LINES_SHOWN:]
        print(f"{name}: {ending}; the end of {log}:", *tail, sep="\n    ", flush=True)
        results.add({"worker": name, "ending": ending, "log": tail})
    return ending


def _end(process: subprocess.Popen[Any]) -> None:
    """End a worker, if it still runs, and the processes it has started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return  # no process is left


def end_here() -> None:
    """End this worker immediately: an orderly shutdown of engines may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def refuse_missing(modules: Sequence[str]) -> None:
    """Exit before anything is started if a package is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        sys.exit(f"This needs {', '.join(missing)}: install it, or choose what does without.")
    if "trustbatch" not in installed_versions():
        sys.exit("trustbatch is not installed, only importable: a run notes its version.")


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages that matter."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def describe_machine() -> dict[str, Any]:
    """Return date, versions and hardware; starts to use the GPU."""
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": installed_versions(),
        "cuda": torch.version.cuda,
        "device": device.name if device else "CPU",
        "device_gib": device.total_memory / 2**30 if device else None,
        "cpu_cores": os.cpu_count(),
    }
