"""Kills, damage and attacks by the hundred, and how many there were.

    python benchmarks/reliability.py [--result results/reliability.json]

Runs the tests that count what they try, all of which must pass, and writes the counts with date,
machine, versions and command. Then it prints the table of docs/reliability.md, which
tests/benchmarks/test_reliability.py compares with the file. Takes about 20 minutes on two cores.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/checkpoints/test_kills.py",
    "tests/checkpoints/test_damage.py",
    "tests/cluster/test_chaos.py",
    "tests/rewards/test_hostile_rewards.py",
    "tests/math_grading/test_attacks.py",
)
GROUPS = {
    "kills": "SIGKILLs of a run in one process",
    "damage": "damaged checkpoints",
    "cluster": "SIGKILLs of processes of a cluster",
    "rewards": "graders that return or do what none should",
    "grader": "attacks on the math grader",
}
TOTALS = {
    "kills": "kills",
    "damage": "checkpoints",
    "cluster": "kills",
    "rewards": "hostile",
    "grader": "attacks",
}
"""which count of a group is that of everything tried"""


def measure() -> dict[str, Any]:
    """Run the tests and return what they counted; ends the program if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        environment = {
            **os.environ,
            "TRUSTBATCH_RELIABILITY_COUNTS": str(counts),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        start = time.monotonic()
        # an empty marker expression takes the place of pytest's own, which leaves out long tests
        command = [sys.executable, "-m", "pytest", "-m", "", *TESTS]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            sys.exit("A test failed, so there is nothing to report.")
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "command": "python benchmarks/reliability.py",
            "machine": f"{os.cpu_count()} cores of {processor()}, {platform.system()}",
            "python": platform.python_version(),
            "packages": {name: version(name) for name in ("torch", "transformers", "ray")},
            "minutes": round((time.monotonic() - start) / 60),
            "counts": json.loads(counts.read_text()),
        }


def processor() -> str:
    """Return the name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def table_of(summary: dict[str, Any]) -> str:
    """Return a summary as the table of the page."""
    packages = ", ".join(f"{name} {number}" for name, number in summary["packages"].items())
    lines = [
        f"{summary['date']}, {summary['machine']}, Python {summary['python']}, {packages},",
        f"{summary['minutes']} minutes:",
        "",
        f"    {summary['command']}",
        "",
        "| tried | number | of them |",
        "|---|---|---|",
    ]
    for group, title in GROUPS.items():
        counts = dict(summary["counts"][group])
        total = counts.pop(TOTALS[group])
        parts = [f"{name.replace('_', ' ')} {count}" for name, count in sorted(counts.items())]
        lines.append(f"| {title} | {total} | {', '.join(parts)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, default=ROOT / "results" / "reliability.json")
    options = parser.parse_args()
    summary = measure()
    options.result.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table_of(summary)}")


if __name__ == "__main__":
    main()
