"""The progress line of a training run."""

import time
from collections.abc import Mapping
from typing import TextIO

from trustbatch.utils.entropy_watch import EntropyWatch
from trustbatch.utils.terminal import LiveLine, is_verbose

SECONDS_BETWEEN = 30.0
"""between two lines where the output is not a terminal"""


class Progress:
    """Shows the state after each step; without a terminal, after each tenth or every 30 seconds."""

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        first: Mapping[str, float] | None = None,
        stream: TextIO | None = None,
    ):
        """Start after `done` of `total` steps; `first` has the metrics of the run's first step."""
        self.label = label
        self.total = total
        self._line = LiveLine(stream)
        self._done_at_start = done
        self._start = time.monotonic()
        self._every = 1 if self._line.is_live or is_verbose() else max(total // 10, 1)
        self._shown = self._start
        self._entropy = EntropyWatch(
            first, settings="rollout.temperature or training.learning_rate"
        )

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the state after `step`."""
        if warning := self._entropy.warning(metrics):
            self._line.warn(warning)
        now = time.monotonic()
        is_time = now - self._shown >= SECONDS_BETWEEN
        if step % self._every == 0 or is_time or step == self.total:
            self._shown = now
            self._line.show(self.text(step, metrics), last=step == self.total)

    def text(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return step, reward, loss, 1-ESS, tokens/s, time left, and the state of the workers."""
        elapsed = time.monotonic() - self._start
        left = elapsed / max(step - self._done_at_start, 1) * (self.total - step)
        reward = metrics.get("reward/mean")
        return (
            f"{self.label}  step {step}/{self.total}"
            f"  reward {'none graded' if reward is None else f'{reward:.3f}'}"
            f"  loss {metrics.get('policy/loss', float('nan')):+.4f}"
            f"  1-ESS {metrics.get('one_minus_ess', float('nan')):.1e}"
            f"  {metrics.get('time/tokens_per_second', 0.0):,.0f} tok/s"
            f"  {int(left) // 60}:{int(left) % 60:02d} left{_worker_text(metrics)}"
        )


def _worker_text(metrics: Mapping[str, float]) -> str:
    """Return the lag, and with a cluster the buffered batches and how busy the trainer is."""
    parts = []
    if lag := metrics.get("rollout/lag_mean"):
        parts.append(f"lag {lag:.3g}")
    if "cluster/buffered_batches" in metrics:
        parts.append(f"buffer {metrics['cluster/buffered_batches']:.0f}")
        parts.append(f"trainer {metrics.get('time/trainer_busy_share', float('nan')):.0%} busy")
    return "".join(f"  {part}" for part in parts)
