"""Columns of rows: which one holds the problem, the answer and the rest, in whatever format."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trustbatch.errors import did_you_mean
from trustbatch.math_grading.extract import last_box
from trustbatch.tasks.conversations import Conversation, read_conversation
from trustbatch.tasks.rows import BadRow

COLUMNS = ("problem", "answer", "id", "system", "difficulty")
"""keys of `task.columns`; each is also the default name of its column"""
PROBLEM_COLUMNS = ("problem", "messages")
"""where the problem is unless `task.columns` names its column"""
_SOLUTION = re.compile(r"(?:^|\n)####[ \t]*(\S[^\n]*?)\s*$")
"""the last line of a worked solution, as in GSM8K"""


def check_columns(columns: Any) -> None:
    """Refuse a `task.columns` that is no table of known keys and names."""
    if columns is None:
        return
    if not isinstance(columns, Mapping):
        raise ValueError('task.columns is a table: write {problem = "question"}.')
    for key, name in columns.items():
        if key not in COLUMNS:
            raise ValueError(
                f"task.columns has {key!r}{did_you_mean(key, COLUMNS)}: its keys are "
                f"{', '.join(COLUMNS)}; other columns go to task.extra_columns."
            )
        if not isinstance(name, str) or (not name and key != "answer"):
            raise ValueError(f"task.columns.{key} = {name!r} must be the name of a column.")


def read_problem(row: Mapping[str, Any], columns: Mapping[str, str]) -> Conversation:
    """Return the problem of a row, a text or a list of messages; raises BadRow."""
    known = [name for name in PROBLEM_COLUMNS if name in row]
    name = columns.get("problem", known[0] if known else "problem")
    value = column_of(row, name, "task.columns.problem")
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        asked = read_conversation(value, name)
    else:
        asked = Conversation(text_of(row, name, key="task.columns.problem"))
    if "system" in columns and not asked.system:
        return replace(asked, system=text_of(row, columns["system"], key="task.columns.system"))
    return asked


def read_answer(row: Mapping[str, Any], columns: Mapping[str, str], reply: str | None) -> str:
    """Return what a completion is compared with: a column, or else the assistant's reply.

    An empty name says that the data has no answers.
    """
    name = columns.get("answer", "answer")
    if not name:
        return ""
    if "answer" not in columns and name not in row and reply is not None:
        start, end = last_box(reply) or (0, None)
        return _result(reply) if end is None else reply[start:end]
    return _result(text_of(row, name, key="task.columns.answer"))


def _result(answer: str) -> str:
    """Return the result of a worked solution, which is behind ####; other text as it is."""
    found = _SOLUTION.search(answer)
    return found[1] if found else answer


def column_of(row: Mapping[str, Any], name: str, key: str) -> Any:
    """Return the value in a column; `key` is the setting that names it."""
    if name not in row:
        raise BadRow(
            f"has no field {name!r}, but {', '.join(map(str, row)) or 'nothing'}", fix=f"set {key}"
        )
    return row[name]


def text_of(row: Mapping[str, Any], name: str, *, key: str) -> str:
    """Return the text or number in a column; `key` is the setting that names it."""
    value = column_of(row, name, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"has {name!r} = {_short(value)}", fix="give text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"has {name!r} = {value}, which is no finite number", fix="fix it")
    return str(value)


def number_of(value: Any) -> float | None:
    """Return a number, also of a text as in CSV; None if it is none."""
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def _short(value: Any) -> str:
    """Return the beginning of a value's text; a nested one is not walked through."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'table'} of {len(value):,} entries"
    return repr(value)[:80]
