"""Write requirements/lock.txt: the packages of this environment with the hashes of their files.

    .venv/bin/python requirements/lock.py

pip says which file it would install of each version, and its hash; nothing is installed. The file
is the one for this Python and this platform. What is left out is in the head of the lock file.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).with_name("lock.txt")
LEFT_OUT = ("pip", "torch", "trustbatch")
HEAD = """\
# The packages that the tests ran with, and the hashes of their files: Python {python}, {system}.
# Made by `.venv/bin/python requirements/lock.py`; the hashes are what pip's sources state.
# They were not compared with another source, and the set was not installed from this file.
#
# torch {torch} is not in it: the tests ran with its CPU build, which is another file than the one
# of the index, so no hash both was tested and fits everybody. Install it first:
#
#     pip install torch=={torch}
#     pip install --require-hashes --no-deps --requirement requirements/lock.txt
#     pip install --no-deps --editable .
"""


def normalized(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Return the version of each package of this environment."""
    return {normalized(each.metadata["Name"]): each.version for each in distributions()}


def hashes(versions: dict[str, str]) -> dict[str, str]:
    """Ask pip for the SHA-256 of the file that it would install of each package."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "wanted.txt", Path(folder) / "report.json"
        wanted.write_text("".join(f"{name}=={each}\n" for name, each in versions.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--no-deps", "--quiet", "--report", str(report), "--requirement", str(wanted)]
        subprocess.run(command, check=True)
        found = json.loads(report.read_text())["install"]
    return {
        normalized(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for each in found
    }


def main() -> None:
    """Write the file."""
    versions = installed()
    torch = versions["torch"].partition("+")[0]
    locked = {name: versions[name] for name in sorted(versions) if name not in LEFT_OUT}
    sums = hashes(locked)
    head = HEAD.format(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        system=f"{platform.system()} {platform.machine()}",
        torch=torch,
    )
    lines = [
        f"{name}=={each} \\\n    --hash=sha256:{sums[name]}\n" for name, each in locked.items()
    ]
    LOCK.write_text(head + "".join(lines))


if __name__ == "__main__":
    main()
