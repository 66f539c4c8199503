"""A disk without room, or one that is read-only: a sentence, and the same command goes on.

The disks are real ones of a few kilobytes, in a mount namespace that ends with its process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
[model]
name = "{model}"
device = "cpu"
[task]
name = "arithmetic"
[rollout]
max_tokens = 4
prompts_per_step = 2
samples_per_prompt = 2
[training]
steps = 2
[run]
name = "r"
folder = "{disk}"
checkpoint_every = 1
"""
SCRIPT = """
import contextlib, io, json, os, subprocess, sys
from pathlib import Path
from trustbatch.cli import main

disk = Path(sys.argv[1])
kinds = json.loads(sys.argv[2])

def said(words):
    streams = io.StringIO()
    with contextlib.redirect_stderr(streams), contextlib.redirect_stdout(streams):
        code = main(words)
    status = disk / "r" / "status.json"
    partial = [path.name for path in disk.rglob(".*") if path.name != ".lock"]
    state = json.loads(status.read_text())["state"] if status.is_file() else None
    return {"code": code, "said": streams.getvalue(), "partial": partial, "state": state}

def mount(*options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", disk], check=True)

for words, options in kinds:
    mount(options)
    first = said(words)
    subprocess.run(["mount", "-o", "remount,rw,size=40m", disk], check=True)
    print(json.dumps([first, said(words)]), flush=True)
    subprocess.run(["umount", disk], check=True)
"""
NAMESPACE = ("unshare", "--map-root-user", "--mount")


def can_mount(folder: Path) -> bool:
    try:
        command = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def outcomes(folder: Path, kinds: list[tuple[list[str], str]]) -> tuple[list[list[dict]], str]:  # type: ignore[type-arg]
    """How each command ended on its disk, then with room; and what threads have printed."""
    disk = folder / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("no disk can be mounted here")
    command = [*NAMESPACE, sys.executable, "-c", SCRIPT, str(disk), json.dumps(kinds)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_run_without_room_says_so_and_goes_on_when_there_is_some(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """The room ends at the start, in TensorBoard's file, in metrics, samples and a checkpoint."""
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(model=tiny_folder, disk=tmp_path / "disk"))
    sizes = ("4k", "8k", "12k", "16k", "20k", "2m")
    kinds = [(["train", str(file)], each) for each in (*(f"size={n}" for n in sizes), "ro")]
    results, noise = outcomes(tmp_path, kinds)
    for (_, kind), (first, second) in zip(kinds, results, strict=True):
        words = " ".join(first["said"].split())
        reason = "Read-only file system: make" if kind == "ro" else "No space left on device"
        assert first["code"] == 2, kind
        assert f"error: {tmp_path / 'disk' / 'r'}" in words
        assert reason in words
        assert "free disk space" in words or kind == "ro"
        assert words.count(f"error: {tmp_path}") == 1
        assert not first["partial"]
        assert first["state"] in (None, "failed")
        assert (second["code"], second["state"]) == (0, "finished")
    assert [first["state"] for first, _ in results[3:6]] == ["failed"] * 3
    assert "Exception in thread" not in noise
    assert "Traceback" not in noise


def test_an_evaluation_without_room_says_so_and_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "disk" / "e"
    options = ["--task", "arithmetic", "--samples", "2", "--prompts", "64", "--max-tokens", "4"]
    options += ["--output", str(output)]
    kinds = [(["eval", str(tiny_folder), *options], each) for each in ("size=8k", "ro")]
    results, noise = outcomes(tmp_path, kinds)
    for (_, kind), (first, second) in zip(kinds, results, strict=True):
        words = " ".join(first["said"].split())
        assert first["code"] == 2, kind
        assert f"error: {output}" in words
        assert ("Read-only file system" if kind == "ro" else "No space left on device") in words
        assert not first["partial"]
        assert second["code"] == 0
    assert "Traceback" not in noise
