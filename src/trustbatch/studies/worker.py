"""A process that does one job after the other: importing torch takes longer than a short run.

Started by the runner as `python -m trustbatch.studies.worker LOG`. Reads jobs from its input, one
line of JSON each, and answers with how each ended before it reads the next. SIGINT asks it to stop
at the next step of a run, with a checkpoint.
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
from trustbatch.studies.folder import EVALUATION_FILE, FAILURE_FILE, write_failure
from trustbatch.studies.job import Job, Outcome
from trustbatch.utils.processes import end_with

LONGEST_LINE = 500


class Worker:
    """Does jobs until there are no more, or until it is asked to stop."""

    def __init__(self) -> None:
        self._was_asked_to_stop = False
        self._until: float | None = None

    def ask_to_stop(self, *_: Any) -> None:
        """Stop at the next step."""
        self._was_asked_to_stop = True

    def is_asked_to_stop(self) -> bool:
        """Whether the job in progress shall end, to be continued later."""
        return self._was_asked_to_stop or (self._until is not None and time.time() >= self._until)

    def do(self, job: Job, until: float | None) -> Outcome:
        """Do one job; whatever goes wrong with it is its own failure."""
        self._until = until
        (job.path / FAILURE_FILE).unlink(missing_ok=True)
        try:
            return self._do(job)
        except Exception as error:  # the other runs of the study go on
            first = str(error).strip().splitlines()
            line = first[0] if first else type(error).__name__
            if not isinstance(error, TrustbatchError):
                line = f"{type(error).__name__}: {line}"
            if job.is_compared:
                write_failure(job.path, line[:LONGEST_LINE], traceback.format_exc())
            traceback.print_exc()
            return "failed"
        finally:
            _forget()

    def _do(self, job: Job) -> Outcome:
        if job.kind == "make_model":
            from trustbatch.studies.tiny_models import make_tiny_model
            from trustbatch.utils.terminal import LiveLine

            make_tiny_model(job.path, say=LiveLine().show)
            return "finished"
        if job.kind == "benchmark":
            from trustbatch.studies.benchmark_job import evaluate_on_suite

            evaluate_on_suite(job)
            return "finished"
        return self._train(job)

    def _train(self, job: Job) -> Outcome:
        from trustbatch.api import train_config
        from trustbatch.config import parse_config
        from trustbatch.studies.held_out import evaluate_held_out
        from trustbatch.studies.weights_only import keep_weights_only

        if not job.is_trained:
            config = parse_config(job.details["tree"])
            train_config(config, is_asked_to_stop=self.is_asked_to_stop)
        if not job.is_trained or (not job.is_done and self.is_asked_to_stop()):
            return "stopped"
        checkpoints = job.path / "checkpoints"
        if job.details["held_out"] is not None:
            evaluate_held_out(
                checkpoints / f"step-{job.details['steps']}",
                job.details["held_out"],
                model=job.details["tree"]["model"],
                file=job.path / EVALUATION_FILE,
            )
        for checkpoint in checkpoints.glob("step-*"):
            keep_weights_only(checkpoint)
        return "finished"


def _forget() -> None:
    """Give memory back, and what was compiled for the last model: the next is another one."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.compiler.reset()
        torch.cuda.empty_cache()


def main() -> None:
    """Answer the jobs that come in."""
    parent, log = int(sys.argv[1]), Path(sys.argv[2])
    end_with(parent)
    # what libraries print must not get between the answers
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
