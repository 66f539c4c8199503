"""Real data beside the repository, which is not part of it."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("TRUSTBATCH_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def shared_data(name: str) -> Path:
    """Return the path of a file; skips the test where it is missing."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    return path
