"""Counts of what the long tests tried, for the summary that docs/reliability.md quotes."""

import json
import os
from pathlib import Path

VARIABLE = "TRUSTBATCH_RELIABILITY_COUNTS"
"""names a file that counts are added to; where it is not set they are dropped"""


class Record:
    """Adds counts to those of the other tests of the same session."""

    def add(self, group: str, **counts: int) -> None:
        """Add counts to a group; called once everything that is counted has gone right."""
        if not os.environ.get(VARIABLE):
            return
        path = Path(os.environ[VARIABLE])
        found = json.loads(path.read_text()) if path.is_file() else {}
        table = found.setdefault(group, {})
        for name, count in counts.items():
            table[name] = table.get(name, 0) + count
        path.write_text(json.dumps(found))
