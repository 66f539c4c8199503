"""Data sets on the Hugging Face hub: the files of named tasks, and any data set by its name.

The files of a named task are fetched one by one. A data set by name, `hf:owner/name`, is read by
the package datasets, which knows all layouts; no code of a data set ever runs.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from trustbatch.errors import first_line
from trustbatch.tasks.data_files import is_data_file
from trustbatch.utils.hub import hub_is_reachable

HUB_PREFIX = "hf:"
"""of a `task.path` that names a data set on the hub"""
HUB_TIMEOUT = 10.0
"""seconds to wait for the hub"""
_SHARD = re.compile(r"-\d+-of-(\d+)")
"""in the name of a file that is one of several"""


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
                f"({first_line(error)})"
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


def load_hub_rows(
    path: str, *, subset: str | None, split: str | None, revision: str | None
) -> Iterator[dict[str, Any]]:
    """Return the rows of `hf:owner/name`; only what is not in the cache is downloaded."""
    name = path.removeprefix(HUB_PREFIX)
    datasets = import_datasets(f"task.path = {path!r}")
    # it would report each load to the hub's counter of downloads
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    is_online = Path(name).is_dir() or hub_is_reachable()
    try:
        with _quiet(datasets), _offline(only_if=not is_online):
            found = datasets.load_dataset(name, subset, split=split, revision=revision)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"task.path = {path!r} is no data set on the hub, or is private ({first_line(error)}): "
            "check the name, or set HF_TOKEN."
        ) from error
    except OSError as error:
        raise NotFetchedError(
            f"The data set {name} could not be fetched from the hub ({first_line(error)})"
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"task.path = {path!r} can't be read ({first_line(error)}): check task.subset and "
            "task.split, or give its files with task.path."
        ) from error
    return iter(choose_split(found, None, path))


def load_saved_rows(folder: Path, split: str | None, path: str) -> Iterator[dict[str, Any]]:
    """Return the rows of a folder that `save_to_disk` of the package datasets has written."""
    datasets = import_datasets(f"task.path = {path!r}, which save_to_disk has written,")
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"task.path = {path!r} can't be read ({first_line(error)}): save it again."
        ) from error
    return iter(choose_split(found, split, path))


def choose_split(found: Any, split: str | None, path: str) -> Any:
    """Return one split of what `datasets` has loaded."""
    if not isinstance(found, dict):  # a data set without splits
        if split is not None:
            raise ValueError(f"task.path = {path!r} has no splits: remove task.split.")
        return found
    if split is None and len(found) > 1 and "train" not in found:
        raise ValueError(f"task.path = {path!r} has several splits: {_set_split(found)}.")
    name = split or ("train" if "train" in found else next(iter(found)))
    if name not in found:
        raise ValueError(f"task.path = {path!r} has no split {name!r}: {_set_split(found)}.")
    return found[name]


def import_datasets(what: str) -> Any:
    """Import the package datasets; `what` needs it."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{what} needs the package datasets: pip install 'trustbatch[datasets]'.")
    import datasets

    return datasets


def _set_split(found: Iterable[str]) -> str:
    return f"set task.split to {' or '.join(found)}"


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Hide the progress bars, which would mix with the lines of a run."""
    was_enabled = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_enabled:
            datasets.enable_progress_bars()


@contextmanager
def _offline(*, only_if: bool) -> Iterator[None]:
    """Read from the cache alone: without a network the client would try again for half a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or only_if
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
