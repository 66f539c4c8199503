"""Where the real data lies that some tests look at: beside the repository, or where told."""

import os
from pathlib import Path

import pytest


def shared_data(name: str) -> Path:
    """Return the path of a file of real data; the test is skipped where it is missing."""
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("TRUSTBATCH_TEST_DATA", default)) / name
    if not path.exists():
        pytest.skip(f"{path} is not there: set TRUSTBATCH_TEST_DATA to the folder with the data")
    return path
