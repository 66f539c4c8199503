"""Runs the jobs of a study in worker processes, and continues where the last start stopped."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trustbatch.observe.status import FILE_NAME as STATUS_FILE
from trustbatch.studies.folder import write_failure
from trustbatch.studies.job_pool import JobPool, WorkerProcess
from trustbatch.studies.jobs import Job
from trustbatch.utils.terminal import LiveLine

LOOK_SECONDS = 0.5
SECONDS_BETWEEN_LINES = 15.0
"""if the output is not a terminal"""
STOP_SECONDS = 120.0
"""for a worker that was asked to stop to reach its next step and write a checkpoint"""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many jobs run at a time, and for how long."""

    parallel: int = 1
    seconds: float | None = None
    """time for all jobs; the rest is left to the next start"""
    least_seconds: float = 0.0
    """no job is started with less time left"""
    end_seconds: float = STOP_SECONDS
    """after the time is over, for running jobs to stop"""
    threads: int | None = None


@dataclass
class Tally:
    """The outcomes of all jobs."""

    total: int
    done: int
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    was_interrupted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether every job has an outcome."""
        return not self.left


def run_jobs(
    jobs: Sequence[Job], *, pace: Pace, logs: Path, lock: int, retry_failed: bool = False
) -> Tally:
    """Run the jobs that have no outcome yet; Ctrl-C stops at the next step, twice immediately."""
    return _Runner(jobs, pace=pace, logs=logs, lock=lock, retry_failed=retry_failed).run()


class _Runner:
    def __init__(
        self, jobs: Sequence[Job], *, pace: Pace, logs: Path, lock: int, retry_failed: bool
    ) -> None:
        self._jobs = jobs
        self._pace = pace
        finished = [job for job in jobs if job.is_done]
        failed = [
            job for job in jobs if job not in finished and job.has_failed and not retry_failed
        ]
        self._waiting = [job for job in jobs if job not in finished and job not in failed]
        self._tally = Tally(
            total=sum(job.is_compared for job in jobs),
            done=sum(job.is_compared for job in finished),
            failed=[job.name for job in failed],
        )
        self._start = time.monotonic()
        self._until = None if pace.seconds is None else time.time() + pace.seconds
        self._pool = JobPool(pace.parallel, logs=logs, lock=lock, threads=pace.threads)
        self._line, self._shown = LiveLine(), 0.0
        self._num_ended = 0
        self._longest = 0.0
        """seconds of the longest job that has finished since the start"""
        self._broken_models: set[str] = set()

    def run(self) -> Tally:
        try:
            try:
                self._work()
            except KeyboardInterrupt:
                self._tally.was_interrupted = True
                self._line.show(
                    "Stopping after the current step; press Ctrl-C again to stop immediately.",
                    last=True,
                )
                self._wait_for_stop()
        finally:
            self._pool.close()
        failed = set(self._tally.failed)
        compared = [job for job in self._jobs if job.is_compared and job.name not in failed]
        self._tally.left = [job.name for job in compared if not job.is_done]
        self._tally.done = len(compared) - len(self._tally.left)
        return self._tally

    def _work(self) -> None:
        while self._waiting or self._pool.busy:
            self._send_jobs()
            if not self._pool.busy:
                return  # no time to start the waiting jobs
            self._receive(LOOK_SECONDS)
            self._show()
            if self._until is not None and time.time() > self._until + self._pace.end_seconds:
                return  # workers that did not stop are killed; their last checkpoints remain

    def _wait_for_stop(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._pool.busy:
            worker.ask_to_stop()
        while self._pool.busy and time.monotonic() < deadline:
            self._receive(LOOK_SECONDS)

    def _send_jobs(self) -> None:
        for job in list(self._waiting):
            if not self._has_time(job):
                return
            broken = self._broken_models.intersection(job.needs)
            if broken:
                self._waiting.remove(job)
                self._fail(job, f"The model {min(broken)} could not be made.", "")
                continue
            if not all(Path(model).is_dir() for model in job.needs):
                continue  # the model is being made
            worker = self._pool.idle()
            if worker is None:
                return
            self._waiting.remove(job)
            # what is lost if it stops is not asked to: it may just come to its end
            worker.send(job, until=None if job.record else self._until)

    def _has_time(self, job: Job) -> bool:
        if self._until is None:
            return True
        wanted = max(self._pace.least_seconds, self._longest if job.record else 0.0)
        return self._until - time.time() > wanted

    def _receive(self, seconds: float) -> None:
        for worker in self._pool.wait(seconds):
            outcome = worker.receive()
            job, worker.job = worker.job, None
            if outcome is None:
                self._remove(worker, job)
            elif outcome == "failed" and job is not None:
                self._note_failure(job)
            elif outcome == "finished":
                self._tally.done += job is not None and job.is_compared
                self._longest = max(self._longest, worker.seconds)
            self._num_ended += 1

    def _remove(self, worker: WorkerProcess, job: Job | None) -> None:
        status, log = worker.exit_status(), worker.log_tail()
        self._pool.remove(worker)
        if job is not None and not self._tally.was_interrupted:
            self._fail(job, f"The worker process {status}.", log)

    def _fail(self, job: Job, error: str, log: str) -> None:
        if job.is_compared:
            write_failure(job.path, error, log)
        self._note_failure(job)

    def _note_failure(self, job: Job) -> None:
        self._tally.failed.append(job.name)
        if job.kind == "make_model":
            self._broken_models.add(job.folder)

    def _show(self) -> None:
        now = time.monotonic()
        if not self._line.is_live and now - self._shown < SECONDS_BETWEEN_LINES:
            return
        self._shown = now
        tally = self._tally
        parts = [f"{tally.done}/{tally.total} done"]
        if tally.failed:
            parts.append(f"{len(tally.failed)} failed")
        parts.append(f"{self._time_left()} left")
        running = ", ".join(worker.job.name for worker in self._pool.busy if worker.job)
        self._line.show(f"{', '.join(parts)}  {running}")

    def _time_left(self) -> str:
        """Extrapolate from the jobs done since the start; running jobs count by their steps."""
        shares = [
            share_done(worker.job.path / STATUS_FILE) for worker in self._pool.busy if worker.job
        ]
        done = self._num_ended + sum(shares)
        if done < 0.1:
            return "?"
        left = len(self._waiting) + len(shares) - sum(shares)
        seconds = (time.monotonic() - self._start) / done * left
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def share_done(status_file: Path) -> float:
    """Return the share of a run's steps that are done; 0 if its status can't be read."""
    try:
        status = json.loads(status_file.read_text(encoding="utf-8"))
        return status["step"] / status["steps"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0.0
