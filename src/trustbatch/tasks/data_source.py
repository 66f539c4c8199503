"""Where rows come from: a file, a folder, or a data set on the hub, each with its fingerprints."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trustbatch.tasks.data_files import find_files, is_data_file, read_rows
from trustbatch.tasks.hub_data import HUB_PREFIX, load_hub_rows, load_saved_rows
from trustbatch.tasks.rows import BadRows, Row

SAVED = ("state.json", "dataset_dict.json")
"""files of a folder that `save_to_disk` of the package datasets has written"""


def is_data_path(name: str) -> bool:
    """Whether a name is that of a data file or of a data set on the hub, and not of a task."""
    return name.startswith(HUB_PREFIX) or is_data_file(name)


@dataclass
class DataSource:
    """The rows of `task.path`, and what tells later whether they were edited."""

    path: str
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    """paths of the files that were read, by name"""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of rows that are no files here, by name; complete after the last row"""

    def rows(self, bad: BadRows | None = None) -> Iterator[Row]:
        """Return the rows; bad ones are added to `bad`, or else refused."""
        is_hub = self.path.startswith(HUB_PREFIX)
        for key in ("subset", "revision"):
            if getattr(self, key) is not None and not is_hub:
                raise ValueError(
                    f"task.{key} is of a data set on the hub: remove it, or write task.path = "
                    f"{HUB_PREFIX + 'owner/name'!r}."
                )
        if is_hub:
            return self._hashed(
                load_hub_rows(
                    self.path, subset=self.subset, split=self.split, revision=self.revision
                )
            )
        folder = Path(self.path)
        if not folder.is_dir():
            if self.split is not None:
                raise ValueError(
                    "task.split selects a split of a folder or on the hub: remove it, or remove "
                    "task.path."
                )
            return self._of_files([folder], bad)
        if any((folder / name).is_file() for name in SAVED):
            arrow = sorted(folder.rglob("*.arrow"))
            self.files.update({str(file): str(file) for file in arrow})
            return self._placed(load_saved_rows(folder, self.split, self.path))
        return self._of_files(find_files(folder, self.split), bad)

    def _of_files(self, files: list[Path], bad: BadRows | None) -> Iterator[Row]:
        self.files.update({str(file): str(file) for file in files})
        return (row for file in files for row in read_rows(str(file), bad))

    def _placed(self, rows: Iterator[Mapping[str, Any]]) -> Iterator[Row]:
        for number, row in enumerate(rows, start=1):
            yield Row(row, f"row {number} of {self.path!r}")

    def _hashed(self, rows: Iterator[Mapping[str, Any]]) -> Iterator[Row]:
        """Hash the rows: the files behind them depend on the version that has written them."""
        found = hashlib.sha256()
        for row in self._placed(rows):
            found.update(json.dumps(row, sort_keys=True, default=repr).encode())
            yield row
        name = "/".join(filter(None, (self.path, self.subset, self.split)))
        self.digests[name] = found.hexdigest()
