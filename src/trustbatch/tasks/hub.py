"""Data sets on the Hugging Face hub, as the files that they consist of."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import cast

from trustbatch.tasks.rows import is_data_file

SECONDS = 10.0
"""until a hub that does not answer is given up"""
SHARD = re.compile(r"-\d+-of-(\d+)")
"""in the name of a file that is one of several"""


class NotFetchedError(ValueError):
    """The hub did not answer, or does not have the data."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: give a file with task.path, or go online.")
        self.what = what


@dataclass(frozen=True)
class HubDataset:
    """Where the splits of a data set lie, e.g. {"train": "main/train-*.parquet"}."""

    repository: str
    files: Mapping[str, str]
    """pattern of the files of each split, in which a star matches slashes too; the first split is
    the usual one"""

    @property
    def splits(self) -> list[str]:
        """Names of the splits, the usual one first."""
        return list(self.files)

    def fetch(self, split: str) -> list[str]:
        """Return paths of the files of a split; asks the hub only for what is not in the cache."""
        # what is there stays as it is: a data set must not change between two starts of a run
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
        return [str(folder / name) for name in found] if _is_whole(found) else []

    def _downloaded(self, pattern: str) -> list[str]:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        # the bases are the errors of the HTTP library, which is another in other versions
        failures = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
        try:
            listed = HfApi().dataset_info(self.repository, timeout=SECONDS).siblings or []
            return [
                hf_hub_download(self.repository, name, repo_type="dataset", etag_timeout=SECONDS)
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


def _is_whole(names: list[str]) -> bool:
    """Whether no file is missing, as far as names tell: a download may have been interrupted."""
    numbers = [int(shard.group(1)) for name in names if (shard := SHARD.search(name))]
    return all(number == len(names) for number in numbers)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(".")
