"""A process that executes jobs one after another: importing torch takes longer than a short run.

Started by the runner as `python -m trustbatch.studies.worker PARENT LOG`. It reads jobs from its
input, one line of JSON each, and answers with the outcome of each before it reads the next. SIGINT
makes it stop at the next step of a run, with a checkpoint.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trustbatch.errors import TrustbatchError
from trustbatch.studies.folder import FAILURE_FILE, write_failure
from trustbatch.studies.jobs import Job, Outcome
from trustbatch.utils.processes import end_with

MAX_ERROR_LENGTH = 500


class Worker:
    """Executes jobs, and records the failures of those that raise."""

    def __init__(self) -> None:
        self._was_asked_to_stop = False
        self._model: Mapping[str, Any] | None = None
        """settings of the model that the last run had"""
        self._until: float | None = None

    def ask_to_stop(self, *_: Any) -> None:
        """Stop at the next step."""
        self._was_asked_to_stop = True

    def is_asked_to_stop(self) -> bool:
        """Whether the job in progress shall end, to be continued later."""
        return self._was_asked_to_stop or (self._until is not None and time.time() >= self._until)

    def do(self, job: Job, until: float | None) -> Outcome:
        """Execute one job until the time `until`; an error fails this job alone."""
        self._until = until
        (job.path / FAILURE_FILE).unlink(missing_ok=True)
        try:
            self._forget_compiled(job)
            # here, so that an import that fails is a failure of the job
            from trustbatch.studies.execute import execute

            return execute(job, is_asked_to_stop=self.is_asked_to_stop)
        except Exception as error:  # the other runs of the study continue
            first = str(error).strip().splitlines()
            line = first[0] if first else type(error).__name__
            if not isinstance(error, TrustbatchError):
                line = f"{type(error).__name__}: {line}"
            if job.is_compared:
                write_failure(job.path, line[:MAX_ERROR_LENGTH], traceback.format_exc())
            traceback.print_exc()
            return "failed"
        finally:
            _free_memory()

    def _forget_compiled(self, job: Job) -> None:
        """Free compiled layers where a job has another model; those of the same one fit again."""
        model, torch = job.details.get("tree", {}).get("model"), _torch()
        if torch is not None and model != self._model:
            torch.compiler.reset()
        self._model = model


def _free_memory() -> None:
    """Free the memory of the last model."""
    gc.collect()
    torch = _torch()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _torch() -> Any:
    """Return the module if it has been imported: nothing here waits for it."""
    return sys.modules.get("torch")


def main() -> None:
    """Execute the jobs of the input until it ends."""
    parent, log = int(sys.argv[1]), Path(sys.argv[2])
    end_with(parent)
    # the output of libraries goes to the log: this pipe is for answers alone
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    worker = Worker()
    signal.signal(signal.SIGINT, worker.ask_to_stop)
    for line in sys.stdin:
        message: Mapping[str, Any] = json.loads(line)
        outcome = worker.do(Job(**message["job"]), message["until"])
        answers.write(json.dumps({"outcome": outcome}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
