"""The loss and the metrics of one optimizer step, one micro-batch after the other."""

from collections.abc import Iterable

import torch
from torch import Tensor

from trustbatch.errors import DivergedError
from trustbatch.integrations.step_totals import step_totals
from trustbatch.objectives import Objective, TokenBatch, Totals
from trustbatch.objectives.metrics import (
    LogRatioPart,
    Metrics,
    average_over_steps,
    merge_metrics,
)
from trustbatch.utils.distributed import all_gather, num_ranks


class StepMetrics:
    """Collects the metrics of the micro-batches of an optimizer step."""

    def __init__(self) -> None:
        self._parts: list[Metrics] = []

    def add(self, metrics: Metrics) -> None:
        """Take note of a micro-batch."""
        self._parts.append(metrics)

    def finish(self) -> dict[str, float]:
        """Return the numbers of the step, of all ranks, and start the next one. Collective."""
        of_rank, self._parts = merge_metrics(self._parts), []
        return average_over_steps([merge_metrics(all_gather(of_rank))])


class StepLoss:
    """An objective on the micro-batches of a step, whose totals are known before the first."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.totals: Totals | None = None
        self._metrics = StepMetrics()

    def begin(self, batches: Iterable[TokenBatch]) -> None:
        """Measure the totals of a step on all its micro-batches. Collective."""
        self.totals = step_totals(self.objective, batches)

    def share(self, tokens: TokenBatch, metrics: Metrics) -> Tensor:
        """Return a micro-batch's share of the step's loss, where gradients are averaged over ranks.

        The shares of the micro-batches add up, so it must not be divided by their number.
        """
        assert self.totals is not None, "begin comes first"
        output = self.objective(tokens, self.totals)
        self._metrics.add(output.metrics | metrics)
        return output.loss * num_ranks()

    def finish(self) -> dict[str, float]:
        """Return the step's metrics; a loss that is not finite ends training here. Collective."""
        metrics = self._metrics.finish()
        loss = metrics["policy/loss"]
        if not torch.isfinite(torch.tensor(loss)):
            raise DivergedError(
                f"The loss of this optimizer step is {loss}: go back to a checkpoint before it, "
                "and lower the learning rate."
            )
        return metrics


@torch.no_grad()
def ledger_metrics(tokens: TokenBatch, *, engine: str | None) -> Metrics:
    """Return the parts of the log-ratios by cause, as far as a trainer's own tensors show them.

    They lead from the behavior policy to the trainer at generation (`proximal_logp`), which is the
    part `engine`, and from there to the policy now, *updates*. Without a recorded behavior policy
    the first part is 0, and `engine` None.
    """
    assert tokens.proximal_logp is not None, "the caller gives it"
    kept = tokens.select(tokens.measurable(tokens.proximal_logp))
    assert kept.proximal_logp is not None
    now, before = kept.logp.double(), kept.behavior_logp.double()
    generated = kept.proximal_logp.double()
    metrics: Metrics = {"ledger/updates": LogRatioPart.of(now - generated, now - before)}
    if engine is not None:
        metrics[f"ledger/{engine}"] = LogRatioPart.of(generated - before, now - before)
    return metrics
