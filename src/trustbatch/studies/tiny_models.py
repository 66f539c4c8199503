"""The tiny models of the smoke and cpu scales: warm starts that all studies share.

The quickstart's model takes seconds, and every seed has its own. The one trained on a corpus takes
minutes: all seeds share it, as they would share a real model, and differ in prompts and samples.
"""

import fcntl
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trustbatch.errors import CheckpointError

TINY_MODEL = "tiny-model-{seed}"
NEXT_TINY_MODEL = "tiny-model-{seed+1}"
DERAIL_MODEL = "derail-model-0"
OTHER_DERAIL_MODEL = "derail-model-1"
"""from another seed: other weights, and another corpus of the same language"""
_NAME = re.compile(r"(tiny|derail)-model-(\d+)$")
WAIT_SECONDS = 1200.0


def resolve_tiny_models(value: Any, *, seed: int, folder: Path) -> Any:
    """Replace the names of tiny models in a configuration by the paths of a seed's models."""
    if isinstance(value, dict):
        return {
            key: resolve_tiny_models(each, seed=seed, folder=folder) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [resolve_tiny_models(each, seed=seed, folder=folder) for each in value]
    if value == TINY_MODEL:
        return str(tiny_model(folder, seed))
    if value == NEXT_TINY_MODEL:
        return str(tiny_model(folder, seed + 1))
    return str(folder / value) if value in (DERAIL_MODEL, OTHER_DERAIL_MODEL) else value


def tiny_model(folder: Path, seed: int) -> Path:
    """Return the path of a seed's model, which may not exist yet."""
    return folder / f"tiny-model-{seed}"


def tiny_models_in(tree: Any) -> list[Path]:
    """Return the paths of all tiny models in a configuration."""
    if isinstance(tree, dict):
        return [path for value in tree.values() for path in tiny_models_in(value)]
    if isinstance(tree, list):
        return [path for value in tree for path in tiny_models_in(value)]
    is_tiny = isinstance(tree, str) and _NAME.search(tree) is not None
    return [Path(tree)] if is_tiny else []


def make_tiny_model(path: Path, *, say: Callable[[str], None]) -> None:
    """Make a model unless it exists; wait if another process is making it."""
    found = _NAME.search(path.name)
    assert found is not None, "tiny_models_in found it"
    warm_start = _warm_start(found.group(1))
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        _wait_for(lock.fileno(), path)
        if not path.is_dir():
            warm_start(path, seed=int(found.group(2)), progress=say)


def _warm_start(kind: str) -> Callable[..., Path]:
    if kind == "derail":
        from trustbatch.models.derail import warm_start
    else:
        from trustbatch.models.tiny import warm_start
    return warm_start


def _wait_for(lock: int, path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.2)
    raise CheckpointError(
        f"Timed out after {WAIT_SECONDS:.0f} s while another process was making {path}: end that "
        "process, and start again."
    )
