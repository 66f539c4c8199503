"""The manifest of a checkpoint: which files it has, and how to see that they are whole."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trustbatch.errors import CheckpointError
from trustbatch.utils.files import fsync

MANIFEST_FILE = "manifest.json"
FORMAT = 1
"""raised with every change that older readers would misread"""


def seal(path: Path) -> dict[str, Any]:
    """Bring a file to the disk; returns what is compared when it is read again."""
    fsync(path)
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the last file of a checkpoint."""
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
    fsync(path)


def listed_bytes(folder: Path) -> int:
    """Return how many bytes `verify` will read."""
    return sum(int(entry["bytes"]) for entry in _listed_files(folder).values())


def verify(folder: Path) -> None:
    """Raise unless every file of the manifest is there and holds what was written."""
    files = _listed_files(folder)
    for name, entry in files.items():  # lengths first: they cost nothing
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{name} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{name} has {path.stat().st_size:,} bytes, not {entry['bytes']:,}"
            )
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: _digest(folder / name), files)
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
