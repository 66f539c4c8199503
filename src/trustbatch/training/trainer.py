"""The update: from train sequences to a better policy."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.batching.samples import mini_batches
from trustbatch.errors import DivergedError
from trustbatch.models.policy import Policy
from trustbatch.objectives import Objective, ObjectiveOutput, TokenBatch, Totals
from trustbatch.objectives.metrics import Count, Mean, Metrics, average_over_steps, merge_metrics
from trustbatch.training.activation_budget import ActivationBudget
from trustbatch.training.config import TrainingConfig
from trustbatch.training.lag_ratios import lag_ratios, lags_of
from trustbatch.training.layer_calls import compile_layers, recompute_layers
from trustbatch.training.logprobs import EntropyUse, TokenLogprobs, token_logprobs
from trustbatch.training.optimizer import (
    build_optimizer,
    learning_rate_factor,
    set_learning_rate,
)
from trustbatch.training.policy_ratios import policy_ratios
from trustbatch.training.sharding import refuse_useless_offload
from trustbatch.types import TrainSequence
from trustbatch.utils.distributed import (
    all_gather,
    all_reduce_sum,
    full_tensor,
    num_ranks,
    this_rank,
)

MAX_CONSECUTIVE_SKIPS = 5
_Measure = Callable[[TokenBatch, MicroBatch], Metrics]


@dataclass(frozen=True)
class _Anchored:
    """A micro-batch on the device, with the log-probs that stay fixed during a pass."""

    batch: MicroBatch
    proximal: TokenLogprobs | None
    reference_logp: Tensor | None


class Trainer:
    """Takes `passes` over each batch of rollouts, in `mini_batches` optimizer steps a pass."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: TrainingConfig,
        *,
        policy_temperature: float,
        seed: int,
        reference: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.policy_temperature = policy_temperature
        self.seed = seed
        self.reference = reference
        refuse_useless_offload(config, policy.device)
        policies = [policy] if reference is None else [policy, reference]
        _prepare_layers(policies, config)
        self.optimizer = build_optimizer(
            config.optimizer,
            [parameter for _, parameter in policy.trained_parameters()],
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self._packs = all(each.packs for each in policies)
        self._may_share_prompts = config.share_prompts and all(
            each.shares_prompts for each in policies
        )
        self.num_optimizer_steps = 0
        self.num_consecutive_skips = 0

    def train(
        self, sequences: Sequence[TrainSequence], *, version: int | None = None
    ) -> dict[str, float]:
        """Update the policy on one batch of rollouts; returns the metrics of all its steps.

        With the `version` of the policy now, what it sampled at earlier ones is also measured by
        lag.
        """
        if not sequences:  # no completion of the batch could be graded
            num_skipped = self.config.passes * self.config.mini_batches
            self.num_optimizer_steps += num_skipped
            return {"steps/skipped": float(num_skipped)}
        steps: list[Metrics] = []
        apart = self._apart(sequences, version)
        for pass_number in range(self.config.passes):
            seed = f"{self.seed}:{self.num_optimizer_steps}:{pass_number}"
            parts = [
                micro_batches(
                    part,
                    max_tokens=self.config.micro_batch_tokens,
                    pad_token_id=self.policy.pad_token_id,
                    packs=self._packs,
                    may_share_prompts=self._may_share_prompts,
                    rank=this_rank(),
                    num_ranks=num_ranks(),
                )
                for part in mini_batches(sequences, self.config.mini_batches, seed=seed)
            ]
            # the proximal policy is the one at the start of the pass: all anchors come first
            anchored = [[self._anchor(batch, len(parts)) for batch in part] for part in parts]
            steps += [self._optimizer_step(part, apart) for part in anchored]
        return average_over_steps(steps)

    def _apart(self, sequences: Sequence[TrainSequence], version: int | None) -> list[_Measure]:
        """Return what measures parts of the batch, where it has several or old ones."""
        measures: list[_Measure] = []
        name = self.policy.name
        if len({sequence.completion.provenance.policy for sequence in sequences}) > 1:
            measures.append(lambda tokens, batch: policy_ratios(tokens, batch.policies))
        if version is not None and lags_of(sequences, policy=name, version=version) - {0}:
            measures.append(functools.partial(lag_ratios, policy=name, version=version))
        return measures

    def _optimizer_step(self, parts: Sequence[_Anchored], apart: Sequence[_Measure]) -> Metrics:
        """Accumulate the gradient of all micro-batches, then step once, or not at all."""
        from_policy = self.objective.totals_need_policy
        totals, outputs = self._accumulate(parts, apart, from_policy=from_policy)
        counted = sum(all_gather(sum(output.num_tokens for output in outputs)))
        if counted != int(totals.num_tokens):
            # the policy itself gave a non-finite log-prob, which the data could not foretell
            self.optimizer.zero_grad(set_to_none=True)
            totals, outputs = self._accumulate(parts, apart, from_policy=True)
        parameters = [parameter for _, parameter in self.policy.trained_parameters()]
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip))
        loss = all_reduce_sum(torch.stack([output.loss.detach() for output in outputs]).sum())
        learning_rate = self._set_learning_rate(self.objective.learning_rate_factor(totals))
        usable = bool((totals.num_tokens > 0) & torch.isfinite(norm) & torch.isfinite(loss))
        if usable:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # generation needs the memory
        self._count_skips(usable)
        self.num_optimizer_steps += 1
        of_ranks = all_gather(merge_metrics(output.metrics for output in outputs))
        metrics = merge_metrics(of_ranks)
        metrics["gradient/norm"] = Mean.of(norm)
        metrics["learning_rate"] = Mean.of(torch.tensor(learning_rate, dtype=torch.float64))
        metrics["steps/skipped"] = Count(torch.tensor(float(not usable)))
        return metrics

    def _accumulate(
        self, parts: Sequence[_Anchored], apart: Sequence[_Measure], *, from_policy: bool
    ) -> tuple[Totals, list[ObjectiveOutput]]:
        """Add up the gradient of all micro-batches, each weighed by the totals of the step."""
        held = self._hold(parts) if from_policy or len(parts) == 1 else {}
        totals = self._totals(parts, held, from_policy=from_policy)
        outputs = []
        for number, part in enumerate(parts):
            tokens = held.pop(number, None)
            if tokens is None:
                tokens = self._tokens(part)
            output = self.objective(tokens, totals)
            output.loss.backward()
            for measure in apart:
                output.metrics.update(measure(tokens, part.batch))
            outputs.append(output)
            del tokens  # or its graph lives on beside the next
        return totals, outputs

    def _hold(self, parts: Sequence[_Anchored]) -> dict[int, TokenBatch]:
        """Run the first passes with gradient, as many as memory holds side by side.

        They serve twice: for the totals of the step, and for its gradient.
        """
        room = ActivationBudget(self.policy)
        held: dict[int, TokenBatch] = {}
        for number, part in enumerate(parts):
            if number and not room.has_one_more():
                break
            with room.measured():
                held[number] = self._tokens(part)
        return held

    def _totals(
        self, parts: Sequence[_Anchored], held: Mapping[int, TokenBatch], *, from_policy: bool
    ) -> Totals:
        """Totals of the step: from passes that are held, a pre-pass, or from the data alone."""
        totals: list[Totals] = []
        for number, part in enumerate(parts):
            tokens = held.get(number)
            if tokens is None:
                logp = part.batch.behavior_logp
                if from_policy:
                    with torch.no_grad():
                        logp = token_logprobs(
                            self.policy, part.batch, temperature=self.policy_temperature
                        ).logp
                tokens = self._pack(part, logp)
            totals.append(self.objective.totals(tokens))
        of_ranks: list[Totals] = all_gather(functools.reduce(operator.add, totals))
        return functools.reduce(operator.add, of_ranks).to(self.policy.device)

    def _tokens(self, part: _Anchored) -> TokenBatch:
        """Run the policy with gradient, and lay its tokens beside what is known of them."""
        current = token_logprobs(
            self.policy,
            part.batch,
            temperature=self.policy_temperature,
            with_top=self.objective.needs_top_logp,
            entropy=EntropyUse.LEARNED if self.objective.entropy_coef else EntropyUse.REPORTED,
        )
        return self._pack(part, current.logp, top_logp=current.top_logp, entropy=current.entropy)

    def _pack(
        self,
        part: _Anchored,
        logp: Tensor,
        *,
        top_logp: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> TokenBatch:
        batch, proximal = part.batch, part.proximal
        with_top, with_anchor = self.objective.needs_top_logp, self.objective.needs_anchor
        if proximal is None and self.objective.needs_proximal:
            # a pass of one step: the policy that starts it is the policy that takes it
            detached_top = None if top_logp is None else top_logp.detach()
            proximal = TokenLogprobs(logp.detach(), detached_top, None)
        return TokenBatch(
            logp=logp,
            behavior_logp=batch.behavior_logp,
            advantage=batch.advantage,
            sequence=batch.sequence,
            proximal_logp=proximal.logp if proximal else None,
            reference_logp=part.reference_logp,
            entropy=entropy,
            top_logp=top_logp,
            behavior_top_logp=batch.behavior_top_logp if with_top else None,
            source=batch.source,
            anchor_logp=batch.anchor_logp if with_anchor else None,
            anchor_top_logp=batch.anchor_top_logp if with_top and with_anchor else None,
            proximal_top_logp=proximal.top_logp if proximal and top_logp is not None else None,
        )

    def _anchor(self, batch: MicroBatch, steps_in_pass: int) -> _Anchored:
        batch = batch.to(self.policy.device)
        needs_snapshot = self.objective.needs_proximal and steps_in_pass > 1
        temperature, with_top = self.policy_temperature, self.objective.needs_top_logp
        proximal = reference = None
        with torch.no_grad():
            if needs_snapshot:
                proximal = token_logprobs(
                    self.policy, batch, temperature=temperature, with_top=with_top
                )
            if self.reference is not None:
                reference = token_logprobs(self.reference, batch, temperature=temperature).logp
        return _Anchored(batch, proximal, reference)

    def _set_learning_rate(self, factor: float) -> float:
        """Set the schedule's learning rate times what the objective makes of it."""
        config = self.config
        scheduled = config.learning_rate * learning_rate_factor(
            self.num_optimizer_steps,
            config.steps * config.passes * config.mini_batches,
            warmup_fraction=config.warmup_fraction,
            schedule=config.schedule,
        )
        set_learning_rate(self.optimizer, scheduled * factor)
        return scheduled * factor

    def _count_skips(self, usable: bool) -> None:
        self.num_consecutive_skips = 0 if usable else self.num_consecutive_skips + 1
        if self.num_consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            raise DivergedError(
                f"The last {MAX_CONSECUTIVE_SKIPS} optimizer steps had no usable gradient "
                "(non-finite, or no measurable token) and were skipped: lower "
                "training.learning_rate, or look at tokens/nonfinite for broken log-probs."
            )


def _prepare_layers(policies: Sequence[Policy], config: TrainingConfig) -> None:
    """Arrange how layers are run; a reference on the policy's own parameters has its layers."""
    models = {policy.model: None for policy in policies}
    if config.compile:
        for model in models:
            compile_layers(model)
    if config.gradient_checkpointing:
        recompute_layers(policies[0].model)  # a reference has no backward pass
