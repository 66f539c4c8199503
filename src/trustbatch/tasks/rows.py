"""Rows of data files: JSONL, JSON and Parquet."""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")


def is_data_file(name: str) -> bool:
    """Whether a name is one of a file that can be read."""
    return name.endswith(ENDINGS)


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"task.path = {path!r} is not a file: check the path.")
    if not is_data_file(file.name):
        raise ValueError(
            f"task.path = {path!r} must end in .jsonl, .jsonl.gz, .json (a list) or .parquet."
        )
    if file.suffix == ".parquet":
        yield from _read_parquet(file)
        return
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            if file.suffix == ".json":
                yield from _parse_list(lines.read(), path)
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, number, path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"task.path = {path!r} can't be read: {error}.") from error


def _parse_line(line: str, number: int, path: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"Line {number} of {path!r} is not JSON: {error.msg}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"Line {number} of {path!r} must be a JSON object with named fields.")
    return row


def _parse_list(text: str, path: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path!r} is not JSON: {error.msg}; lines of JSON belong into a .jsonl file."
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path!r} must be a list of JSON objects with named fields.")
    return rows


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet files need pyarrow: pip install 'trustbatch[parquet]'.")
    import pyarrow
    import pyarrow.parquet

    try:
        yield from pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"task.path = {str(file)!r} can't be read: {error}.") from error
