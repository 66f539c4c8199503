"""How far a run is, from the file that it writes about once a second."""

import json
from pathlib import Path


def share_done(status_file: Path) -> float:
    """Return the share of a run's steps that have been taken; 0 where that can't be told."""
    try:
        status = json.loads(status_file.read_text(encoding="utf-8"))
        return status["step"] / status["steps"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0.0
