"""One line that says how a run is doing."""

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from trustbatch.observe.entropy_watch import EntropyWatch


class LiveLine:
    """A line that is rewritten in place on a terminal; elsewhere every text gets its own line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.is_live = self.stream.isatty()

    def show(self, text: str, *, last: bool = False) -> None:
        """Replace the line; after the `last` text the next output starts below it."""
        if self.is_live and not last:
            # a line that wraps could not be taken back
            text = text[: shutil.get_terminal_size().columns - 1]
        start = "\r\x1b[2K" if self.is_live else ""
        end = "\n" if last or not self.is_live else ""
        self.stream.write(f"{start}{text}{end}")
        self.stream.flush()


SECONDS_BETWEEN = 30.0
"""between two lines where no one watches"""


class Progress:
    """Shows the state after each step; where no one watches, ten times and twice a minute."""

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        first: Mapping[str, float] | None = None,
        stream: TextIO | None = None,
    ):
        """Start after `done` steps; `first` has the metrics of the first of them."""
        self.label = label
        self.total = total
        self._line = LiveLine(stream)
        self._done_at_start = done
        self._start = time.monotonic()
        self._every = 1 if self._line.is_live else max(total // 10, 1)
        self._shown = self._start
        self._entropy = EntropyWatch(first)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the state after `step`."""
        if remark := self._entropy.remark(metrics):
            self._line.show(remark, last=True)
        now = time.monotonic()
        is_time = now - self._shown >= SECONDS_BETWEEN
        if step % self._every == 0 or is_time or step == self.total:
            self._shown = now
            self._line.show(self.text(step, metrics), last=step == self.total)

    def text(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return step, reward, loss, 1-ESS, tokens/s and time left, and how the workers keep up."""
        elapsed = time.monotonic() - self._start
        left = elapsed / max(step - self._done_at_start, 1) * (self.total - step)
        reward = metrics.get("reward/mean")
        return (
            f"{self.label}  step {step}/{self.total}"
            f"  reward {'none graded' if reward is None else f'{reward:.3f}'}"
            f"  loss {metrics.get('policy/loss', float('nan')):+.4f}"
            f"  1-ESS {metrics.get('one_minus_ess', float('nan')):.1e}"
            f"  {metrics.get('time/tokens_per_second', 0.0):,.0f} tok/s"
            f"  {int(left) // 60}:{int(left) % 60:02d} left{_of_workers(metrics)}"
        )


def _of_workers(metrics: Mapping[str, float]) -> str:
    """Return the lag where there is one, and who waits for whom where work goes on side by side."""
    parts = []
    if lag := metrics.get("rollout/lag_mean"):
        parts.append(f"lag {lag:.3g}")
    if "cluster/buffered_batches" in metrics:
        parts.append(f"buffer {metrics['cluster/buffered_batches']:.0f}")
        parts.append(f"trainer {metrics.get('time/trainer_busy_share', float('nan')):.0%} busy")
    return "".join(f"  {part}" for part in parts)
