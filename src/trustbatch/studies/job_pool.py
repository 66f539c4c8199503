"""The worker processes that execute a study's jobs, as the runner sees them."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from trustbatch.studies.jobs import Job, Outcome
from trustbatch.utils.processes import kill_group

KILL_SECONDS = 10.0


class WorkerProcess:
    """One worker, and its current job."""

    def __init__(self, number: int, *, logs: Path, lock: int, threads: int | None) -> None:
        self.number = number
        self.log = logs / f"worker-{number}.log"
        self.job: Job | None = None
        self._sent = 0.0
        environment = dict(os.environ)
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trustbatch.studies.worker", str(os.getpid()), str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # it inherits the study's lock, so that a restarted study waits for its end
            pass_fds=(lock,),
            # Ctrl-C reaches the runner alone, which asks its workers to stop
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs: IO[bytes] = self._process.stdin
        self.answers: IO[bytes] = self._process.stdout

    def send(self, job: Job, *, until: float | None) -> None:
        """Send a job; if the process has died, `receive` tells."""
        self.job, self._sent = job, time.monotonic()
        line = json.dumps({"job": job.to_dict(), "until": until}) + "\n"
        with contextlib.suppress(BrokenPipeError):
            self._jobs.write(line.encode())
            self._jobs.flush()

    @property
    def seconds(self) -> float:
        """Seconds since it was sent its last job."""
        return time.monotonic() - self._sent

    def receive(self) -> Outcome | None:
        """Return the outcome of its job; None if the process has died."""
        line = self.answers.readline()
        return json.loads(line)["outcome"] if line else None

    def ask_to_stop(self) -> None:
        """Ask it to stop at the next step."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def exit_status(self) -> str:
        """Wait for the process to end, and describe how it ended."""
        self._process.wait()
        code = self._process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        if not self.log.is_file():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])

    def end(self) -> None:
        """Let the process end if it is idle; kill it with its child processes if it is busy."""
        if self.job is None:
            # closing flushes a job that a dead process has not read
            with contextlib.suppress(BrokenPipeError):
                self._jobs.close()
            try:
                self._process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()
        else:
            self._kill()
        self.answers.close()

    def _kill(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()


class JobPool:
    """Up to `size` workers, started when there is work for them."""

    def __init__(self, size: int, *, logs: Path, lock: int, threads: int | None) -> None:
        self.size = size
        self._logs, self._lock, self._threads = logs, lock, threads
        self._selector = selectors.DefaultSelector()
        self.workers: list[WorkerProcess] = []

    @property
    def busy(self) -> list[WorkerProcess]:
        """Workers with a job."""
        return [worker for worker in self.workers if worker.job is not None]

    def idle(self) -> WorkerProcess | None:
        """Return a worker without a job, started if need be; None if all are busy."""
        for worker in self.workers:
            if worker.job is None:
                return worker
        if len(self.workers) == self.size:
            return None
        taken = {worker.number for worker in self.workers}
        number = next(n for n in range(self.size) if n not in taken)
        worker = WorkerProcess(number, logs=self._logs, lock=self._lock, threads=self._threads)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        self.workers.append(worker)
        return worker

    def wait(self, seconds: float) -> list[WorkerProcess]:
        """Wait for answers and deaths, and return the workers to `receive` from."""
        return [key.data for key, _ in self._selector.select(seconds)]

    def remove(self, worker: WorkerProcess) -> None:
        """End one worker."""
        self._selector.unregister(worker.answers)
        self.workers.remove(worker)
        worker.end()

    def close(self) -> None:
        """End all workers."""
        for worker in list(self.workers):
            self.remove(worker)
        self._selector.close()
