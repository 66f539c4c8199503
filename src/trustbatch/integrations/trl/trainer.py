"""P3O in TRL's GRPOTrainer."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from trustbatch.integrations.step_loss import StepLoss
from trustbatch.integrations.step_totals import ObjectiveChoice, as_objective
from trustbatch.integrations.trl.log import StepLog
from trustbatch.integrations.trl.settings import fitted, truncates, warn_of_unrecorded_truncation
from trustbatch.integrations.trl.tokens import ledger_of, loss_mask, tokens_of
from trustbatch.objectives import TokenBatch
from trustbatch.utils.distributed import all_reduce_sum, num_ranks

MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""what a micro-batch may hold for the model beside tokens"""


class P3OTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with an objective of trustbatch instead of TRL's losses.

    All arguments are GRPOTrainer's, and `objective`: a name, a table such as {"name": "grpo",
    "clip_high": 0.28}, or an instance. Its totals, such as P3O's effective sample size, are of the
    whole optimizer step: all its micro-batches on all ranks.
    """

    _tag_names = ["trl", "trustbatch"]  # noqa: RUF012  # lists and dictionaries in TRL
    _name = "P3O"
    _paper = {}  # noqa: RUF012

    def __init__(self, *args: Any, objective: ObjectiveChoice = "p3o", **kwargs: Any) -> None:
        chosen = as_objective(objective)
        super().__init__(*args, **kwargs)
        self.objective = fitted(chosen, self.args)
        warn_of_unrecorded_truncation(self)
        self._truncated = truncates(self.args)
        self._loss = StepLoss(self.objective)
        self._step_log = StepLog(self._metrics["train"])
        self._samples: list[Any] = []
        """what the data loader gave for each micro-batch of the step"""
        self._step_inputs: list[dict[str, Any]] = []
        """the micro-batches of the step; empty until the first one is asked for"""
        self._is_fresh: list[bool] = []
        """of each of them, whether the policy is still the one at generation"""
        self._first = 0
        """TRL's number of the step's first micro-batch"""
        self._generated_at = -1
        """the optimizer step at which the newest completions were generated"""
        self.add_callback(LearningRateFactor(self._loss))

    def _send_telemetry(self) -> None:
        """Send nothing."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Take note of all micro-batches of an optimizer step before the first of them."""
        self._samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_inputs = []
        return self._samples, count

    @property
    def _is_training(self) -> bool:
        return self.model is not None and self.model.training

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not self._is_training:
            return super()._prepare_inputs(generation_batch)
        if not self._step_inputs:
            self._prepare_step()
        return self._step_inputs[self._step - self._first]

    def _prepare_step(self) -> None:
        """Generate, or take from TRL's buffer, all micro-batches of the step."""
        self._first, self._step_inputs, self._is_fresh = self._step, [], []
        for number, sample in enumerate(self._samples):
            self._step = self._first + number  # by which TRL knows when to generate
            self._step_inputs.append(super()._prepare_inputs(sample))
            self._is_fresh.append(self._generated_at == self.state.global_step)
        self._step = self._first

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self._is_training:
            self._generated_at = self.state.global_step
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self._is_training:
            return self._evaluated_loss(model, inputs)
        number, num_batches = self._step - self._first, len(self._step_inputs)
        if number == 0 and num_batches > 1:
            self._loss.begin(self._tokens_before_step(model))
        logp, entropy, auxiliary = self._forward(model, inputs)
        tokens = tokens_of(inputs, logp, entropy=entropy, truncated=self._truncated)
        if num_batches == 1:  # its own forward pass supplies the totals
            self._loss.begin([tokens])
        loss = self._loss.share(tokens, ledger_of(inputs, tokens, truncated=self._truncated))
        if number == num_batches - 1:
            self._step_log.write(self._loss.finish())
        if auxiliary is not None:
            loss = loss + self.router_aux_loss_coef * auxiliary / num_batches
            mean = all_reduce_sum(auxiliary.detach()) / num_ranks()
            self._metrics["train"]["aux_loss"].append(mean.item())
        return loss

    def _evaluated_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of an evaluation batch, which is a step of its own."""
        logp, entropy, _ = self._forward(model, inputs)
        tokens = tokens_of(inputs, logp, entropy=entropy, truncated=self._truncated)
        measured = StepLoss(self.objective)
        measured.begin([tokens])
        loss = measured.share(tokens, {})
        for name, value in measured.finish().items():
            self._metrics["eval"][name].append(value)
        return loss

    def _forward(
        self, model: torch.nn.Module, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs [B, T] and entropy [B, T] of the completions; the router's loss."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs.get(name) for name in MODEL_INPUTS},
        )

    def _tokens_before_step(self, model: torch.nn.Module) -> Iterator[TokenBatch]:
        """Yield the tokens of each micro-batch with the log-probs that its totals need."""
        for inputs, is_fresh in zip(self._step_inputs, self._is_fresh, strict=True):
            logp = self._known_logp(inputs, is_fresh=is_fresh)
            if logp is None:
                with torch.no_grad():
                    logp, _, _ = self._forward(model, inputs)
            yield tokens_of(inputs, logp, truncated=self._truncated)

    def _known_logp(self, inputs: Mapping[str, Any], *, is_fresh: bool) -> Tensor | None:
        """Return log-probs [B, T] from which the totals follow without a forward pass, if any."""
        sampled = inputs.get("sampling_per_token_logps")
        generated = inputs.get("old_per_token_logps")
        any_logp = torch.zeros_like(loss_mask(inputs), dtype=torch.float32)
        if not self.objective.totals_need_policy:  # they count tokens
            return next((each for each in (sampled, generated) if each is not None), any_logp)
        if generated is not None:
            return generated if is_fresh else None
        # the policy itself is the behavior policy: whatever its log-probs are, all ratios are 1
        return any_logp if sampled is None else None


class LearningRateFactor(TrainerCallback):
    """Multiplies the learning rate of one optimizer step by the objective's factor."""

    def __init__(self, loss: StepLoss) -> None:
        self._loss = loss
        self._rates: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, optimizer: torch.optim.Optimizer, **__: Any) -> None:
        """Set the rate of this step."""
        assert self._loss.totals is not None, "a step has had its losses"
        factor = self._loss.objective.learning_rate_factor(self._loss.totals)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def on_optimizer_step(self, *_: Any, optimizer: torch.optim.Optimizer, **__: Any) -> None:
        """Restore what the schedule has set."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
