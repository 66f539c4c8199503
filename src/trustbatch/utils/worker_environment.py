"""The environment variables of worker processes: those that programs need, and no secrets."""

import os
import sys
from collections.abc import Sequence

from trustbatch.errors import ConfigError

KEPT = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ"),
        *("TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"),
    )
)
KEPT_PREFIXES = ("LC_", "XDG_", "PYTHON", "OMP_", "GOMP_", "MKL_", "OPENBLAS_")


def worker_environment(named: Sequence[str], *, key: str) -> dict[str, str]:
    """Return the variables of a worker process: the usual ones, and those that a setting names.

    With them it finds this package, uses one thread, and iterates over sets in the same order as
    every other worker: what it generates from a seed does not depend on the process.
    """
    for name in named:
        if name not in os.environ:
            raise ConfigError(
                f"{key} names {name}, which is not set: set the variable where the run is "
                "started, or remove the name."
            )
    usual = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES)
    }
    asked_for = {name: os.environ[name] for name in named}
    path = os.pathsep.join(filter(None, sys.path))
    own = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    return {"OMP_NUM_THREADS": "1", **usual, **asked_for, **own}
