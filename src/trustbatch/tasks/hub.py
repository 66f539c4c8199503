"""Data sets on the Hugging Face hub, as the files that they consist of."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import cast

from trustbatch.tasks.rows import is_data_file

SECONDS = 10.0
"""until a hub that does not answer is given up"""


@dataclass(frozen=True)
class HubDataset:
    """Where the splits of a data set lie, e.g. {"train": "main/train-*.parquet"}."""

    repository: str
    files: Mapping[str, str]
    """pattern of the files of each split; the first split is the usual one"""

    @property
    def splits(self) -> list[str]:
        """Names of the splits, the usual one first."""
        return list(self.files)

    def fetch(self, split: str) -> list[str]:
        """Return paths of the files of a split; asks the hub only for what is not in the cache."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        # the bases are the errors of the HTTP library, which is another in other versions
        failures = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
        pattern = self.files[split]
        # what is there stays as it is: a data set must not change between two starts of a run
        for is_cached in (True, False):
            try:
                folder = snapshot_download(
                    self.repository,
                    repo_type="dataset",
                    allow_patterns=[pattern],
                    etag_timeout=SECONDS,
                    local_files_only=is_cached,
                )
            except failures as error:
                if not is_cached:
                    raise ValueError(
                        f"The data set {self.repository} could not be fetched from the hub "
                        f"({_first_line(error)}): give a file with task.path, or go online."
                    ) from error
                continue
            files = _matching(Path(folder), pattern)
            if files:
                return files
        raise ValueError(
            f"The data set {self.repository} has no files {pattern}: give a file with task.path."
        )


def _matching(folder: Path, pattern: str) -> list[str]:
    """Return data files by the hub's rule, in which a star matches slashes too."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [str(folder / n) for n in sorted(names) if fnmatch(n, pattern) and is_data_file(n)]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(".")
