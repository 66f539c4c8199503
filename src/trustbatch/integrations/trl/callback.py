"""How far an unchanged GRPOTrainer is off-policy: measured, and logged beside TRL's numbers."""

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from trustbatch.errors import ConfigError
from trustbatch.integrations.step_loss import StepMetrics
from trustbatch.integrations.trl.log import StepLog
from trustbatch.integrations.trl.settings import truncates, warn_of_unrecorded_truncation
from trustbatch.integrations.trl.tokens import ledger_of, tokens_of
from trustbatch.integrations.trl.trainer import P3OTrainer
from trustbatch.objectives.base import ratio_metrics


class TrustCallback(TrainerCallback):
    """Adds 1-ESS, the ratios, their ledger and an entropy watch to the log of a GRPOTrainer.

        trainer.add_callback(TrustCallback(trainer))

    The trainer is an argument, as of TRL's own callbacks, since transformers shows a callback the
    model alone. Training is unchanged: the log-probs are those that TRL computes for its loss.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        if not isinstance(trainer, GRPOTrainer) or isinstance(trainer, P3OTrainer):
            raise ConfigError(
                f"TrustCallback measures TRL's GRPOTrainer, not {type(trainer).__name__}: remove "
                "it, since P3OTrainer and AsyncP3OTrainer log these numbers themselves."
            )
        warn_of_unrecorded_truncation(trainer)
        self._trainer = trainer
        self._truncated = truncates(trainer.args)
        self._metrics = StepMetrics()
        self._step_log = StepLog(trainer._metrics["train"], leave_out=("entropy",))
        self._inputs: dict[str, Any] | None = None
        """the micro-batch whose loss is being computed"""
        self._compute_loss = trainer._compute_loss
        self._logps_and_entropies = trainer._get_per_token_logps_and_entropies
        trainer._compute_loss = self._observed_loss
        trainer._get_per_token_logps_and_entropies = self._observed_logps

    def _observed_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._inputs = inputs if model.training else None
        loss = self._compute_loss(model, inputs)
        self._inputs = None
        return loss

    def _observed_logps(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any, Any]:
        found = self._logps_and_entropies(*args, **kwargs)
        if self._inputs is not None:  # and not TRL's passes over old or reference log-probs
            self._measure(self._inputs, *found[:2])
        return found

    @torch.no_grad()
    def _measure(self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None) -> None:
        batch = tokens_of(inputs, logp, entropy=entropy, truncated=self._truncated)
        metrics = ratio_metrics(batch, batch.select(batch.measurable()))
        self._metrics.add(metrics | ledger_of(inputs, batch, truncated=self._truncated))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Log the numbers of the optimizer step. Collective."""
        self._step_log.write(self._metrics.finish())
