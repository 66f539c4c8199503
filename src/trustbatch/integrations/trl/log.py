"""A step's numbers on their way into TRL's log."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from trustbatch.utils.distributed import this_rank
from trustbatch.utils.entropy_watch import EntropyWatch

logger = logging.getLogger(__name__)


class StepLog:
    """Adds the metrics of each optimizer step to those that TRL averages until it logs."""

    def __init__(self, sink: Mapping[str, list[Any]], *, leave_out: Collection[str] = ()) -> None:
        """`sink` is TRL's dictionary of lists; it has what is left out under the same name."""
        self._sink = sink
        self._leave_out = leave_out
        self._entropy_watch = EntropyWatch(settings="temperature or learning_rate")

    def write(self, metrics: Mapping[str, float]) -> None:
        """Log a step, and warn once if the policy becomes random."""
        for name, value in metrics.items():
            if name not in self._leave_out:
                self._sink[name].append(value)
        warning = self._entropy_watch.warning(metrics)
        if warning is not None and this_rank() == 0:
            logger.warning(warning)
