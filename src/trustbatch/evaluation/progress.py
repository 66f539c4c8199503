"""One line that says how far an evaluation is."""

import time
from collections.abc import Sequence
from typing import TextIO

from trustbatch.evaluation.outcomes import ProblemOutcome
from trustbatch.observe.progress import SECONDS_BETWEEN
from trustbatch.utils.terminal import LiveLine


class EvaluationProgress:
    """Shows problems done, pass@1 so far and time left; where no one watches, now and then."""

    def __init__(
        self, label: str, total: int, *, done: int = 0, stream: TextIO | None = None
    ) -> None:
        self.label = label
        self.total = total
        self.done = done
        self._done_at_start = done
        self._line = LiveLine(stream)
        self._start = self._shown = time.monotonic()
        self._correct = self._graded = 0

    def start(self) -> None:
        """Say what is being waited for."""
        again = f", {self.done} of them done before" if self.done else ""
        self._line.show(f"{self.label}  {self.total} problems{again}", last=not self._line.is_live)

    def update(self, outcomes: Sequence[ProblemOutcome]) -> None:
        """Count some more problems."""
        self.done += len(outcomes)
        self._correct += sum(outcome.correct for outcome in outcomes)
        self._graded += sum(outcome.graded for outcome in outcomes)
        now = time.monotonic()
        is_last = self.done >= self.total
        if self._line.is_live or is_last or now - self._shown >= SECONDS_BETWEEN:
            self._shown = now
            self._line.show(self.text(), last=is_last)

    def text(self) -> str:
        """Return problems done, the share of right samples among the new ones, and time left."""
        elapsed = time.monotonic() - self._start
        left = elapsed / max(self.done - self._done_at_start, 1) * (self.total - self.done)
        right = f"{self._correct / self._graded:.3f}" if self._graded else "-"
        return (
            f"{self.label}  {self.done}/{self.total} problems  right {right}"
            f"  {int(left) // 60}:{int(left) % 60:02d} left"
        )
