"""One line that says how a run is doing."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO


class Progress:
    """A line that is rewritten on a terminal, and printed about twenty times a run elsewhere."""

    def __init__(self, label: str, total: int, *, done: int = 0, stream: TextIO | None = None):
        self.label = label
        self.total = total
        self.stream = stream if stream is not None else sys.stderr
        self._done_at_start = done
        self._start = time.monotonic()
        self._every = max(total // 20, 1)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the state after `step`."""
        live = self.stream.isatty()
        if live or step % self._every == 0 or step == self.total:
            end = "\n" if not live or step == self.total else ""
            start = "\r\x1b[2K" if live else ""
            self.stream.write(f"{start}{self.line(step, metrics)}{end}")
            self.stream.flush()

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return step, reward, loss, 1-ESS, tokens/s and time left."""
        elapsed = time.monotonic() - self._start
        left = elapsed / max(step - self._done_at_start, 1) * (self.total - step)
        return (
            f"{self.label}  step {step}/{self.total}"
            f"  reward {metrics.get('reward/mean', float('nan')):.3f}"
            f"  loss {metrics.get('policy/loss', float('nan')):+.4f}"
            f"  1-ESS {metrics.get('one_minus_ess', float('nan')):.1e}"
            f"  {metrics.get('time/tokens_per_second', 0.0):,.0f} tok/s"
            f"  {int(left) // 60}:{int(left) % 60:02d} left"
        )
