"""P3O in TRL's experimental AsyncGRPOTrainer."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from trustbatch.errors import ConfigError
from trustbatch.integrations.step_loss import StepLoss, ledger_metrics
from trustbatch.integrations.step_totals import ObjectiveChoice, as_objective
from trustbatch.integrations.trl.log import StepLog
from trustbatch.integrations.trl.settings import fitted
from trustbatch.integrations.trl.trainer import LearningRateFactor
from trustbatch.objectives import TokenBatch

TREE_INPUTS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


class AsyncP3OTrainer(AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer with an objective of trustbatch, which corrects for stale rollouts.

    All arguments are AsyncGRPOTrainer's, and `objective`, as of P3OTrainer. The behavior policy is
    vLLM's version that sampled the token; totals are of the whole optimizer step.
    """

    _tag_names = ["trl", "trustbatch"]  # noqa: RUF012  # lists and dictionaries in TRL
    _name = "AsyncP3O"
    _paper = {}  # noqa: RUF012

    def __init__(self, *args: Any, objective: ObjectiveChoice = "p3o", **kwargs: Any) -> None:
        chosen = as_objective(objective)
        super().__init__(*args, **kwargs)
        self.objective = fitted(chosen, self.args)
        self._loss = StepLoss(self.objective)
        self._step_log = StepLog(self._metrics["train"], leave_out=("entropy",))
        self._batches: list[dict[str, Any]] = []
        """the micro-batches of the optimizer step"""
        self._number = 0
        """of them, how many have had their loss"""
        self.add_callback(LearningRateFactor(self._loss))

    def _send_telemetry(self) -> None:
        """Send nothing."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Take note of all micro-batches of an optimizer step before the first of them."""
        self._batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._number = 0
        return self._batches, count

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]  # TRL has no types
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return a micro-batch's share of the step's loss."""
        if not model.training:
            raise ConfigError("AsyncP3OTrainer has no evaluation: set eval_strategy to 'no'.")
        num_batches = len(self._batches)
        if self._number == 0 and num_batches > 1:
            self._loss.begin(self._tokens_before_step(model))
        start = time.time()
        outputs = self._forward(model, inputs)
        seconds = time.time() - start
        # for TRL's own metrics and accounting; its loss is not used
        super().compute_loss(lambda **_: outputs, inputs)  # type: ignore[arg-type]
        self._step_forward_s += seconds
        tokens = _tokens_of(inputs, _selected(inputs, outputs.log_probs), outputs.entropy)
        if num_batches == 1:
            self._loss.begin([tokens])
        # versions between generation and now are not told apart from the engine
        loss = self._loss.share(tokens, ledger_metrics(tokens, engine="sampling_engine_and_lag"))
        self._number += 1
        if self._number == num_batches:
            self._step_log.write(self._loss.finish())
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / num_batches
        return loss

    def _forward(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Run the model on a packed row, as TRL does."""
        row = inputs["attention_mask"].bool()
        longest = inputs["tree_max_seqlens"][0].tolist()
        return model(
            **{
                name: inputs[name][row].unsqueeze(0)
                for name in ("input_ids", "position_ids", "shift_labels")
            },
            **{name: inputs[name][inputs[name] >= 0] for name in TREE_INPUTS},
            tree_max_seqlen_q=longest[0],
            tree_max_seqlen_k=longest[1],
            fused_lm_head=True,
            **({"output_router_logits": True} if self.aux_loss_enabled else {}),
        )

    def _tokens_before_step(self, model: torch.nn.Module) -> Iterator[TokenBatch]:
        """Yield the tokens of each micro-batch with the log-probs that its totals need."""
        for batch in self._batches:
            inputs = self._prepare_inputs(batch)
            if self.objective.totals_need_policy:
                with torch.no_grad():
                    logp = _selected(inputs, self._forward(model, inputs).log_probs)
            else:
                logp = inputs["old_log_probs"][inputs["token_index"] >= 0]
            yield _tokens_of(inputs, logp, None)


def _selected(inputs: Mapping[str, Any], values: Tensor) -> Tensor:
    """Return the values [T] of the trained tokens, of those of all positions."""
    return values.flatten()[inputs["token_index"][inputs["token_index"] >= 0]]


def _tokens_of(inputs: Mapping[str, Any], logp: Tensor, entropy: Tensor | None) -> TokenBatch:
    trained = inputs["token_index"] >= 0
    return TokenBatch(
        logp=logp,
        behavior_logp=inputs["old_log_probs"][trained],
        advantage=inputs["advantages"][trained],
        sequence=inputs["segment_id"][trained],
        # a batch has one optimizer step, so the policy before it is the proximal policy
        proximal_logp=logp.detach(),
        entropy=None if entropy is None else _selected(inputs, entropy),
    )
