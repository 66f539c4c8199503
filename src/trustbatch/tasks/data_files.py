"""Data files: reading rows of JSONL, JSON and Parquet, and fetching them from the hub."""

import gzip
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
HUB_TIMEOUT = 10.0
"""seconds to wait for the hub"""
_SHARD = re.compile(r"-\d+-of-(\d+)")
"""in the name of a file that is one of several"""


def is_data_file(name: str) -> bool:
    """Whether `read_rows` supports a file of this name."""
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
            f"{path!r} is not JSON: {error.msg}; give a file with one JSON object per line the "
            "ending .jsonl."
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


class NotFetchedError(ValueError):
    """The hub could not be reached, or does not have the data."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: give a file with task.path, or go online.")
        self.what = what


@dataclass(frozen=True)
class HubDataset:
    """The files of a data set's splits, e.g. {"train": "main/train-*.parquet"}."""

    repository: str
    files: Mapping[str, str]
    """file pattern of each split, in which a star also matches slashes; the first split is the
    default"""

    @property
    def splits(self) -> list[str]:
        """Names of the splits, the default first."""
        return list(self.files)

    def fetch(self, split: str) -> list[str]:
        """Return the paths of a split's files, downloading only what is not in the cache."""
        # cached files are never updated: data must not change between two starts of a run
        return self._cached(self.files[split]) or self._downloaded(self.files[split])

    def _cached(self, pattern: str) -> list[str]:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(
                snapshot_download(self.repository, repo_type="dataset", local_files_only=True)
            )
        except LocalEntryNotFoundError:
            return []
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        found = _matching(names, pattern)
        return [str(folder / name) for name in found] if _is_complete(found) else []

    def _downloaded(self, pattern: str) -> list[str]:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        # the base classes are errors of the HTTP library, which depends on the client's version
        failures = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
        try:
            listed = HfApi().dataset_info(self.repository, timeout=HUB_TIMEOUT).siblings or []
            return [
                hf_hub_download(
                    self.repository, name, repo_type="dataset", etag_timeout=HUB_TIMEOUT
                )
                for name in _matching([file.rfilename for file in listed], pattern)
            ] or self._refuse_pattern(pattern)
        except failures as error:
            raise NotFetchedError(
                f"The data set {self.repository} could not be fetched from the hub "
                f"({_first_line(error)})"
            ) from error

    def _refuse_pattern(self, pattern: str) -> list[str]:
        raise ValueError(
            f"The data set {self.repository} has no files {pattern}: give a file with task.path."
        )


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    return sorted(name for name in names if fnmatch(name, pattern) and is_data_file(name))


def _is_complete(names: list[str]) -> bool:
    """Whether all shards are present, by their names: a download may have been interrupted."""
    numbers = [int(shard.group(1)) for name in names if (shard := _SHARD.search(name))]
    return all(number == len(names) for number in numbers)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(".")
