"""Real data beside the repository, which is no part of it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def shared_data(name: str) -> Path:
    """Return a file or folder of it, or skip the test where it is missing."""
    folder = Path(os.environ.get("TRUSTBATCH_TEST_DATA", ROOT.parent / "shared" / "data"))
    path = folder / name
    if not path.exists():
        pytest.skip(f"{path} is not there: set TRUSTBATCH_TEST_DATA to the folder with the data")
    return path
