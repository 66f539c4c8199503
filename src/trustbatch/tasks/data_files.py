"""Data files: reading rows of JSONL, JSON, CSV, TSV and Parquet, from one file or a folder."""

import csv
import gzip
import importlib.util
import json
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from trustbatch.errors import first_line
from trustbatch.tasks.rows import MAX_CHARACTERS, BadRow, BadRows, Row

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
_SPLIT = re.compile(r"(?:^|/)(train|test|val(?:id(?:ation)?)?|dev|eval)(?:[^a-z][^/]*|/.*)$", re.I)
"""the split in the path of a file, such as data/train-00000-of-00002.parquet"""


def is_data_file(name: str) -> bool:
    """Whether `read_rows` supports a file of this name."""
    return name.endswith(ENDINGS)


def read_rows(path: str, bad: BadRows | None = None) -> Iterator[Row]:
    """Yield the rows of a file; bad ones are added to `bad`, or else refused."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"task.path = {path!r} is not a file: check the path.")
    if not is_data_file(file.name):
        raise ValueError(
            f"task.path = {path!r} must end in .jsonl, .json (a list), .csv, .tsv (each also with "
            ".gz, but .json) or .parquet."
        )
    refused = BadRows()
    has_good = False
    for where, read in _read_places(file, path):
        try:
            row = read()
        except BadRow as reason:
            (refused if bad is None else bad).add(where, reason)
        else:
            has_good = True
            yield Row(row, where)
    refused.refuse(has_good=has_good)


def _read_places(file: Path, path: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the place of each row, and a function that returns the row or raises BadRow."""
    try:
        if file.suffix == ".parquet":
            for number, row in enumerate(_read_parquet(file), start=1):
                yield f"row {number} of {path!r}", partial(_checked, row)
            return
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8-sig") as lines:
            if file.suffix == ".json":
                for number, row in enumerate(_parse_list(lines.read(), path), start=1):
                    yield f"row {number} of {path!r}", partial(_checked, row)
                return
            if ".csv" in file.suffixes or ".tsv" in file.suffixes:
                yield from _read_table(lines, path, "\t" if ".tsv" in file.suffixes else ",")
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number} of {path!r}", partial(_parse_line, line)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"task.path = {path!r} is no text in UTF-8 ({error.reason} at byte {error.start:,}): "
            "save it in UTF-8, or give its real ending."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"task.path = {path!r} can't be read ({first_line(error)}): copy or write it again."
        ) from error


def find_files(folder: Path, split: str | None) -> list[Path]:
    """Return the data files of a folder and its subfolders in the order of their paths.

    Where names show several splits, `split` chooses one; the default is "train".
    """
    below = (file for file in sorted(folder.rglob("*")) if file.is_file())
    names = [file.relative_to(folder).as_posix() for file in below]
    names = [name for name in names if is_data_file(name) and not re.search(r"(?:^|/)[._]", name)]
    if not names:
        raise ValueError(
            f"task.path = {str(folder)!r} is a folder without data files: give one with files that "
            f"end in {', '.join(ENDINGS)}."
        )
    of_file = {name: found[1].lower() if (found := _SPLIT.search(name)) else "" for name in names}
    splits = sorted(set(of_file.values()))
    if split is None and len(splits) == 1:
        return [folder / name for name in names]
    split = split or "train"
    if split not in splits:
        has = " and ".join(each or "others" for each in splits)
        raise ValueError(
            f"task.path = {str(folder)!r} has files of {has}: set task.split to one of them."
        )
    return [folder / name for name in names if of_file[name] == split]


def _read_table(
    lines: TextIO, path: str, delimiter: str
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the rows of CSV or TSV, whose first line has the names of the columns."""
    csv.field_size_limit(MAX_CHARACTERS)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{path!r} has the column {twice[0]!r} twice: rename one.")
        for values in rows:
            if values:
                yield f"line {rows.line_num} of {path!r}", partial(_table_row, names, values)
    except csv.Error as error:
        raise ValueError(
            f"Line {rows.line_num} of {path!r} can't be read ({error}): fix its quotes, or give "
            "the file its real ending."
        ) from error


def _table_row(names: list[str], values: list[str]) -> dict[str, Any]:
    if len(names) != len(values):
        raise BadRow(f"has {len(values)} values for {len(names)} columns")
    return dict(zip(names, values, strict=True))


def _parse_line(line: str) -> dict[str, Any]:
    return _checked(_parse(line.strip()))


def _parse(text: str) -> Any:
    """Parse JSON; raises BadRow."""
    try:
        return json.loads(text, object_pairs_hook=_fields)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise BadRow(f"is not JSON ({what} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise BadRow("is nested too deeply") from error
    except BadRow:
        raise
    except ValueError as error:  # such as a number of more digits than Python converts
        raise BadRow(f"can't be read ({first_line(error)})") from error


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"has the field {twice!r} twice", fix="remove one")
    return fields


def _checked(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadRow("is no JSON object with named fields")
    return row


def _parse_list(text: str, path: str) -> list[Any]:
    try:
        rows = _parse(text)
    except BadRow as error:
        raise ValueError(
            f"{path!r} {error}: fix it, or give a file with one JSON object per line the ending "
            ".jsonl."
        ) from error
    if not isinstance(rows, list):
        raise ValueError(f"{path!r} must be a list of JSON objects with named fields.")
    return rows


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet files need pyarrow: pip install 'trustbatch[parquet]'.")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"task.path = {str(file)!r} can't be read ({first_line(error)}): copy or write it "
            "again."
        ) from error
