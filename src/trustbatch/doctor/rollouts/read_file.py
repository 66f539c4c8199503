"""Reading a file of rollouts once, in bounded memory: completions from all over the file."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trustbatch.doctor.rollouts.fields import fault
from trustbatch.doctor.rollouts.formats import format_of, parse
from trustbatch.doctor.rollouts.recorded import RecordedRollout, RecordedSettings
from trustbatch.errors import ConfigError, first_line

MAX_LINE = 2**26
"""characters of a line: 64 MiB"""
LINES_PER_NOTICE = 2000


@dataclass(frozen=True)
class RolloutFile:
    """What a file holds, and an even selection of its completions."""

    format: str
    num_lines: int
    num_completions: int
    kept: list[RecordedRollout]
    settings: RecordedSettings
    """the most frequent ones; all kept completions have them"""
    num_other_settings: int
    """completions that were sampled with others, and are left out"""


def read_rollouts(
    file: Path,
    *,
    num_tokens: int,
    stated: RecordedSettings,
    say: Callable[[str], None],
) -> RolloutFile:
    """Read a file, and keep every k-th completion so that about `num_tokens` tokens are kept.

    k doubles whenever there are twice as many, so memory is bounded for any length of the file.
    `stated` settings count where the file has none.
    """
    kept: list[RecordedRollout] = []
    every, number, format_name, line = 1, 0, "", 0
    settings: Counter[RecordedSettings] = Counter()
    for line, record in _records(file):
        format_name = format_name or format_of(record, line=line)
        if format_of(record, line=line) != format_name:
            raise fault(
                line, f"has another format than the first one ({format_name}): split the file"
            )
        for rollout in parse(record, format_name, line=line):
            settings[rollout.settings.or_else(stated)] += 1
            if number % every == 0 and rollout.num_tokens:
                kept.append(rollout)
            number += 1
        if sum(each.num_tokens for each in kept) > 2 * num_tokens and len(kept) > 1:
            kept, every = kept[::2], 2 * every
        if line % LINES_PER_NOTICE == 0:
            say(f"read {line} lines of {file.name}")
    if not kept:
        raise ConfigError(
            f"{file} has no completion with tokens: record completions with their token ids and "
            "log-probs."
        )
    usual = Counter(each.settings.or_else(stated) for each in kept).most_common(1)[0][0]
    return RolloutFile(
        format=format_name,
        num_lines=line,
        num_completions=number,
        kept=[each for each in kept if each.settings.or_else(stated) == usual],
        settings=usual,
        num_other_settings=number - settings[usual],
    )


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _opened(file) as lines:
        number = 0
        while line := lines.readline(MAX_LINE):
            number += 1
            if len(line) >= MAX_LINE:
                raise fault(number, "is longer than 64 MiB: write one completion per line")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise fault(
                    number,
                    f"is not JSON: write one object per line, e.g. with `jq -c .` ({error.msg})",
                ) from error
            if not isinstance(record, dict):
                raise fault(number, "is not a JSON object: write one object per line")
            yield number, record


@contextmanager
def _opened(file: Path) -> Iterator[TextIO]:
    """Open a text file, compressed where its name ends with .gz."""
    opening = gzip.open if file.suffix == ".gz" else open
    try:
        with opening(file, "rt", encoding="utf-8") as lines:
            yield lines
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"The rollouts {file} can't be read ({first_line(error)}): give a JSON Lines file, "
            "plain or compressed as .gz."
        ) from error
