"""How often the kernel has killed a process for want of memory: evidence, instead of a guess."""

import contextlib
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def count_oom_kills() -> int | None:
    """Return the number of processes killed so far, in this container or session if it is counted.

    None where the system has no such number, such as outside of Linux.
    """
    for file in _counters():
        with contextlib.suppress(OSError, ValueError):
            fields = dict(line.split() for line in file.read_text().splitlines() if line.strip())
            if "oom_kill" in fields:
                return int(fields["oom_kill"])
    return None


def _counters() -> list[Path]:
    """Return the files that may have the number, the most specific ones first."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append(CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
            elif not controllers:
                found.append(CGROUPS / path.lstrip("/") / "memory.events")
    # in a container the path may be that of the host
    found += [CGROUPS / "memory.events", CGROUPS / "memory" / "memory.oom_control"]
    return [*found, Path("/proc/vmstat")]
