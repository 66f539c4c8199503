"""Reading the completions that a run has logged."""

import gzip
import json
from pathlib import Path
from typing import Any


def rollout_file(run: Path, step: int) -> Path:
    """The file of a step."""
    return run / "rollouts" / f"step-{step:06d}.jsonl.gz"


def read_rollouts(file: Path) -> list[dict[str, Any]]:
    """The records of one file."""
    return [json.loads(line) for line in rollout_text(file).splitlines()]


def rollout_text(file: Path) -> str:
    """The lines of one file."""
    return gzip.decompress(file.read_bytes()).decode()
