"""The folder of a study: study.json, a run folder per arm and seed, and a lock.

study.json                        what is compared, and whether it has finished
runs/ARM--seed-N/                 an ordinary run folder
runs/ARM--seed-N/evaluation.json  reward on held-out prompts
runs/ARM--seed-N/failure.json     why the run failed, if it did
evaluations/ARM--seed-N/          an evaluation, in the study `benchmarks`
logs/worker-N.log                 output of the worker processes
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from trustbatch.errors import ConfigError
from trustbatch.studies.study import Arm, Study
from trustbatch.utils.files import lock_folder, write_atomically

STUDY_FILE = "study.json"
RUNS = "runs"
EVALUATIONS = "evaluations"
FAILURE_FILE = "failure.json"
EVALUATION_FILE = "evaluation.json"
PAGE_ONLY = "page only"
"""state of a study of which nothing was run here: the next start takes its place"""
SECONDS_FOR_ORPHANS = 10.0
"""in which workers of a killed study end; they hold its lock until then"""


def run_name(arm: str, seed: int) -> str:
    """Return the name of the folder of an arm with a seed."""
    return f"{arm}--seed-{seed}"


class StudyFolder:
    """The folder of a study's results, which one process at a time may write to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None

    def lock(self) -> int:
        """Lock the folder, and return the file descriptor that holds the lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + SECONDS_FOR_ORPHANS
        while self._lock is None:
            try:
                self._lock = lock_folder(
                    self.path,
                    in_use=f"Another process runs the study in {self.path}: wait for it, or choose "
                    "another --out.",
                )
            except ConfigError:
                if time.monotonic() > deadline or self._owner_lives():
                    raise
                time.sleep(0.1)
        write_atomically(self.path / ".owner", str(os.getpid()))
        return self._lock.fileno()

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write(self, study: Study, *, about: Mapping[str, Any], state: str) -> None:
        """Write study.json with the arms and seeds of this start and of earlier ones."""
        before = self.read()
        arms = {arm.name: arm for arm in study.arms}
        seeds = set(study.seeds)
        if before is not None and before["state"] != PAGE_ONLY:
            self._refuse_other(study, before)
            seeds |= set(before["seeds"])
            for tree in before["arms"]:
                arms.setdefault(tree["name"], arm_of(tree))
        write_atomically(
            self.path / STUDY_FILE,
            json.dumps(
                {
                    "name": study.name,
                    "scale": study.scale,
                    "title": study.title,
                    "question": study.question,
                    "subject": study.subject,
                    "paper_columns": dict(study.paper_columns),
                    "seeds": sorted(seeds),
                    "base": dict(study.base),
                    "arms": [_tree_of(arm) for arm in arms.values()],
                    "state": state,
                    **about,
                },
                indent=2,
            )
            + "\n",
        )

    def read(self) -> dict[str, Any] | None:
        """Return the content of study.json; None if it does not exist."""
        file = self.path / STUDY_FILE
        if not file.is_file():
            return None
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{file} is not valid JSON ({error}): delete it, and it will be written again."
            ) from error

    def _owner_lives(self) -> bool:
        """Whether the process that took the lock last is still running."""
        try:
            owner = int((self.path / ".owner").read_text())
            os.kill(owner, 0)
        except (OSError, ValueError):
            return False
        return True

    def _refuse_other(self, study: Study, before: Mapping[str, Any]) -> None:
        """Refuse another study: what all runs share must not change between two starts."""
        arms = {tree["name"]: tree["changes"] for tree in before["arms"]}
        compared = [
            ("name", study.name, before["name"]),
            # the title of `benchmarks` names the study whose checkpoints are evaluated
            ("title", study.title, before["title"]),
            ("configuration", dict(study.base), before["base"]),
            *(
                (f"arm called {arm.name!r}", dict(arm.changes), arms[arm.name])
                for arm in study.arms
                if arm.name in arms
            ),
        ]
        for what, now, then in compared:
            if json.loads(json.dumps(now)) != then:
                raise ConfigError(
                    f"{self.path} holds a study with another {what}: choose another --out, "
                    "or delete that folder."
                )


def _tree_of(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.name,
        "label": arm.label,
        "regime": arm.regime,
        "family": arm.family,
        "changes": dict(arm.changes),
    }


def arm_of(tree: Mapping[str, Any]) -> Arm:
    """Read an arm of study.json."""
    return Arm(
        name=tree["name"],
        label=tree["label"],
        regime=tree["regime"],
        family=tree["family"],
        changes=tree["changes"],
    )


def write_failure(folder: Path, error: str, traceback: str) -> None:
    """Record in a run's folder why it has no result."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"error": error, "traceback": traceback}
    write_atomically(folder / FAILURE_FILE, json.dumps(record, indent=2) + "\n")
