"""Runs the jobs of a study in worker processes, from wherever the last start left off."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trustbatch.observe.status import FILE_NAME as STATUS_FILE
from trustbatch.studies.folder import write_failure
from trustbatch.studies.job import Job
from trustbatch.studies.job_pool import JobPool, WorkerProcess
from trustbatch.studies.running_step import share_done
from trustbatch.utils.terminal import LiveLine

LOOK_SECONDS = 0.5
SECONDS_BETWEEN_LINES = 15.0
"""where no one watches"""
STOP_SECONDS = 120.0
"""in which a worker that was asked to stop reaches its next step and writes a checkpoint"""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many at a time, and until when."""

    parallel: int = 1
    seconds: float | None = None
    """time for all of it; what is left then is for the next start"""
    least_seconds: float = 0.0
    """time left below which nothing is started"""
    end_seconds: float = STOP_SECONDS
    """in which what was asked to stop when the time was over must have ended"""
    threads: int | None = None


@dataclass
class Tally:
    """What became of the jobs."""

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
    """Do what has no outcome yet; Ctrl-C stops at the next step, a second one at once."""
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
        self._begin = time.monotonic()
        self._until = None if pace.seconds is None else time.time() + pace.seconds
        self._crew = JobPool(pace.parallel, logs=logs, lock=lock, threads=pace.threads)
        self._line, self._shown = LiveLine(), 0.0
        self._num_ended_now = 0
        self._broken_models: set[str] = set()

    def run(self) -> Tally:
        try:
            try:
                self._work()
            except KeyboardInterrupt:
                self._tally.was_interrupted = True
                self._line.show(
                    "Stopping after the step in progress; Ctrl-C again stops at once.", last=True
                )
                self._wait_for_stop()
        finally:
            self._crew.close()
        failed = set(self._tally.failed)
        compared = [job for job in self._jobs if job.is_compared and job.name not in failed]
        self._tally.left = [job.name for job in compared if not job.is_done]
        self._tally.done = len(compared) - len(self._tally.left)
        return self._tally

    def _work(self) -> None:
        while self._waiting or self._crew.busy:
            self._hand_out()
            if not self._crew.busy:
                return  # no time for those that wait
            self._hear(LOOK_SECONDS)
            self._show()
            if self._until is not None and time.time() > self._until + self._pace.end_seconds:
                return  # a worker that does not stop is ended; its last checkpoint remains

    def _wait_for_stop(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._crew.busy:
            worker.ask_to_stop()
        while self._crew.busy and time.monotonic() < deadline:
            self._hear(LOOK_SECONDS)

    def _hand_out(self) -> None:
        for job in list(self._waiting):
            if not self._has_time():
                return
            broken = self._broken_models.intersection(job.needs)
            if broken:
                self._waiting.remove(job)
                self._fail(job, f"{min(broken)} could not be made", "")
                continue
            if not all(Path(model).is_dir() for model in job.needs):
                continue  # it is being made
            worker = self._crew.idle()
            if worker is None:
                return
            self._waiting.remove(job)
            worker.give(job, until=self._until)

    def _has_time(self) -> bool:
        return self._until is None or self._until - time.time() > self._pace.least_seconds

    def _hear(self, seconds: float) -> None:
        for worker in self._crew.heard(seconds):
            outcome = worker.hear()
            job, worker.job = worker.job, None
            if outcome is None:
                self._remove(worker, job)
            elif outcome == "failed" and job is not None:
                self._note_failure(job)
            elif outcome == "finished":
                self._tally.done += job is not None and job.is_compared
            self._num_ended_now += 1

    def _remove(self, worker: WorkerProcess, job: Job | None) -> None:
        death, words = worker.death(), worker.exit_reason()
        self._crew.dismiss(worker)
        if job is not None and not self._tally.was_interrupted:
            self._fail(job, f"The process that worked on it {death}.", words)

    def _fail(self, job: Job, error: str, words: str) -> None:
        if job.is_compared:
            write_failure(job.path, error, words)
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
        running = ", ".join(worker.job.name for worker in self._crew.busy if worker.job)
        self._line.show(f"{', '.join(parts)}  {running}")

    def _time_left(self) -> str:
        """Estimate from what has been done since the start; runs in progress count by steps."""
        shares = [
            share_done(worker.job.path / STATUS_FILE) for worker in self._crew.busy if worker.job
        ]
        done = self._num_ended_now + sum(shares)
        if done < 0.1:
            return "?"
        left = len(self._waiting) + len(shares) - sum(shares)
        seconds = (time.monotonic() - self._begin) / done * left
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
