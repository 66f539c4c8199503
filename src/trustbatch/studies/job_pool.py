"""The processes that do a study's jobs, as the one that hands them out sees them."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from trustbatch.studies.job import Job, Outcome

KILL_SECONDS = 10.0


class WorkerProcess:
    """One worker, and the job that it has."""

    def __init__(self, number: int, *, logs: Path, lock: int, threads: int | None) -> None:
        self.number = number
        self.log = logs / f"worker-{number}.log"
        self.job: Job | None = None
        environment = dict(os.environ)
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trustbatch.studies.worker", str(os.getpid()), str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # it holds the study's lock too: who starts the study again waits for its end
            pass_fds=(lock,),
            # a Ctrl-C is for the runner, which asks its workers to stop
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs: IO[bytes] = self._process.stdin
        self.answers: IO[bytes] = self._process.stdout

    def give(self, job: Job, *, until: float | None) -> None:
        """Hand out a job; one that has died is seen by its silence."""
        self.job = job
        line = json.dumps({"job": job.to_dict(), "until": until}) + "\n"
        try:
            self._jobs.write(line.encode())
            self._jobs.flush()
        except BrokenPipeError:
            pass

    def hear(self) -> Outcome | None:
        """Return how its job ended; None if the process has died over it."""
        line = self.answers.readline()
        return json.loads(line)["outcome"] if line else None

    def ask_to_stop(self) -> None:
        """Have it stop at the next step."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def death(self) -> str:
        """Say how the process ended."""
        self._process.wait()
        code = self._process.returncode
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def exit_reason(self) -> str:
        """Return the end of its log."""
        if not self.log.is_file():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])

    def end(self) -> None:
        """Let it finish if it is idle, and kill it with all that it has started if it is not."""
        if self.job is None:
            # it may have died before it read the last job, which closing would send again
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class JobPool:
    """Some workers; one that dies is replaced when there is more to do."""

    def __init__(self, size: int, *, logs: Path, lock: int, threads: int | None) -> None:
        self.size = size
        self._logs, self._lock, self._threads = logs, lock, threads
        self._selector = selectors.DefaultSelector()
        self.workers: list[WorkerProcess] = []

    @property
    def busy(self) -> list[WorkerProcess]:
        """Those with a job."""
        return [worker for worker in self.workers if worker.job is not None]

    def idle(self) -> WorkerProcess | None:
        """Return one without a job, a new one if there may be more."""
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

    def heard(self, seconds: float) -> list[WorkerProcess]:
        """Wait for answers and deaths, and return who has something to say."""
        return [key.data for key, _ in self._selector.select(seconds)]

    def dismiss(self, worker: WorkerProcess) -> None:
        """End one."""
        self._selector.unregister(worker.answers)
        self.workers.remove(worker)
        worker.end()

    def close(self) -> None:
        """End all."""
        for worker in list(self.workers):
            self.dismiss(worker)
        self._selector.close()
