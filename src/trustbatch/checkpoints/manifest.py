"""The manifest of a checkpoint: its files, with sizes and digests to verify them."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trustbatch.errors import CheckpointError
from trustbatch.utils.files import digest_of, fsync

MANIFEST_FILE = "manifest.json"
READ_SUFFIXES = (".safetensors", ".json", ".jsonl", ".toml")
"""of files that a run or Transformers reads; others, such as notes, may lie beside them"""
FORMAT = 1
"""increased with every change that older versions would misread"""


def seal(path: Path) -> dict[str, Any]:
    """Flush a file to the disk; returns its size and digest for the manifest."""
    fsync(path)
    return {"bytes": path.stat().st_size, "sha256": digest_of(path)}


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the last file of a checkpoint."""
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
    fsync(path)


def listed_bytes(folder: Path) -> int:
    """Return the number of bytes that `verify` reads."""
    return sum(int(entry["bytes"]) for entry in _listed_files(folder).values())


def verify(folder: Path) -> None:
    """Raise CheckpointError unless the manifest lists every file that is read, as it is."""
    files = _listed_files(folder)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in READ_SUFFIXES and name not in {MANIFEST_FILE, *files}:
            raise CheckpointError(f"{MANIFEST_FILE} does not list {name}")
    for name, entry in files.items():  # sizes first: they cost nothing
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{name} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{name} has {path.stat().st_size:,} bytes, not {entry['bytes']:,}"
            )
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: digest_of(folder / name), files)
        for (name, entry), digest in zip(files.items(), digests, strict=True):
            if digest != entry["sha256"]:
                raise CheckpointError(f"{name} was changed after it was written")


def _listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise CheckpointError(f"it has no {MANIFEST_FILE}, so another version wrote it")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known = manifest["format"]
        files = {
            name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in manifest["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} can't be read") from error
    if known != FORMAT:
        raise CheckpointError(f"its format is {known}, and this version reads {FORMAT}")
    return files
