"""The policy update: from train sequences to optimizer steps."""

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.batching.sequences import mini_batches
from trustbatch.errors import DivergedError
from trustbatch.models.policy import Policy
from trustbatch.objectives import Objective, ObjectiveOutput, TokenBatch, Totals
from trustbatch.objectives.metrics import Count, Mean, Metrics, average_over_steps, merge_metrics
from trustbatch.training.activation_budget import ActivationBudget
from trustbatch.training.config import TrainingConfig
from trustbatch.training.layers import compile_layers, recompute_layers
from trustbatch.training.logprobs import EntropyUse, token_logprobs
from trustbatch.training.observation import Observation, StepObserver, TokenObserver
from trustbatch.training.optimizer import (
    build_optimizer,
    learning_rate_factor,
    set_learning_rate,
)
from trustbatch.training.sharding import refuse_useless_offload
from trustbatch.types import TrainSequence
from trustbatch.utils.distributed import (
    all_gather,
    all_reduce_sum,
    full_tensor,
    num_ranks,
    this_rank,
)
from trustbatch.utils.lazy import LazySequence

MAX_CONSECUTIVE_SKIPS = 5
"""optimizer steps without a usable gradient after which training stops"""
NEAR_FRACTION = 1 / 64
"""of the spacing of numbers near 1: by this much may totals that were estimated be off"""


class Trainer:
    """Trains a policy: `passes` over each batch of rollouts, `mini_batches` steps per pass."""

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
            offload=config.optimizer_offload,
        )
        self._packs = all(each.packs for each in policies)
        self.num_optimizer_steps = 0
        self.num_consecutive_skips = 0
        self._expects_measurable = True
        """whether all tokens of a step are taken to be measurable until its end; changes its speed
        and nothing else"""
        self._may_estimate = True
        """until an estimate of the totals was wrong; of one batch of rollouts alone, so that the
        run does not depend on where it was resumed"""

    def train(
        self,
        sequences: Sequence[TrainSequence],
        *,
        version: int | None = None,
        observation: Observation | None = None,
    ) -> dict[str, float]:
        """Update the policy on one batch of rollouts; returns the metrics of all its steps.

        With the current `version` of the policy, the ratios are also reported per lag. What an
        `observation` wants of the tokens is added to it.
        """
        if not sequences:  # no completion of the batch was graded
            num_skipped = self.config.passes * self.config.mini_batches
            self.num_optimizer_steps += num_skipped
            return {"steps/skipped": float(num_skipped)}
        self._may_estimate = True
        steps: list[Metrics] = []
        observer = self._observer(sequences, version, observation)
        for pass_number in range(self.config.passes):
            parts = self._parts(sequences, self.config.mini_batches, pass_number=pass_number)
            prepared = self._prepared(parts, observer, steps_in_pass=len(parts))
            steps += [self._optimizer_step(part, observer) for part in prepared]
            observer.end_pass(is_last=pass_number == self.config.passes - 1)
        observer.finish()
        return average_over_steps(steps)

    def first_gradient(
        self, sequences: Sequence[TrainSequence], *, num_steps: int, observer: StepObserver
    ) -> Totals:
        """Leave in `.grad` the gradient of the first of `num_steps` optimizer steps on a batch.

        No step is taken. Returns the totals of that step. The observer sees its micro-batches, and
        sees them again if the totals had to be taken again.
        """
        self._may_estimate = True
        parts = self._parts(sequences, num_steps, pass_number=0)
        (prepared,) = self._prepared(parts[:1], observer, steps_in_pass=len(parts))
        self.optimizer.zero_grad(set_to_none=True)
        totals, _ = self._gradient(prepared, observer)
        return totals

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence]) -> dict[tuple[str, int], Tensor]:
        """Return the policy's log-probs of the sampled tokens of each completion. Collective."""
        found: dict[tuple[str, int], Tensor] = {}
        for batch in self._micro_batches(sequences):
            batch = batch.to(self.policy.device)
            logp = token_logprobs(self.policy, batch, temperature=self.policy_temperature).logp
            # copies: a view would be sent and kept with the values of its whole batch
            found |= {key: own.clone() for key, own in batch.by_completion(logp.cpu()).items()}
        return {key: value for part in all_gather(found) for key, value in part.items()}

    def _observer(
        self,
        sequences: Sequence[TrainSequence],
        version: int | None,
        observation: Observation | None,
    ) -> TokenObserver:
        """Return what follows the tokens; knows those to be recorded as they are now."""
        wanted = observation or Observation()
        observer = TokenObserver(
            wanted,
            self.objective,
            sequences,
            policy=self.policy.name,
            version=version,
            temperature=self.policy_temperature,
        )
        recorded = [each for each in sequences if each.completion.key in wanted.recorded]
        # with one update their only step shows it, and for a ledger all tokens are evaluated
        if recorded and self.config.mini_batches > 1 and not observer.wants_initial:
            observer.keep_initial(self.logprobs(recorded))
        return observer

    def _parts(
        self, sequences: Sequence[TrainSequence], num_steps: int, *, pass_number: int
    ) -> list[LazySequence[MicroBatch]]:
        """Return the micro-batches of each optimizer step of a pass."""
        seed = f"{self.seed}:{self.num_optimizer_steps}:{pass_number}"
        parts = mini_batches(sequences, num_steps, seed=seed)
        return [self._micro_batches(part) for part in parts]

    def _micro_batches(self, sequences: Sequence[TrainSequence]) -> LazySequence[MicroBatch]:
        """Return this rank's part of the forward passes over some sequences."""
        return micro_batches(
            sequences,
            max_tokens=self.config.micro_batch_tokens,
            pad_token_id=self.policy.pad_token_id,
            packs=self._packs,
            may_share_prompts=self.config.share_prompts,
            copies_prompts=self.policy.copies_prompts,
            rank=this_rank(),
            num_ranks=num_ranks(),
        )

    def _optimizer_step(self, batches: Sequence[MicroBatch], observer: StepObserver) -> Metrics:
        """Accumulate the gradient of all micro-batches, then take one step if it is finite."""
        totals, outputs = self._gradient(batches, observer)
        parameters = [parameter for _, parameter in self.policy.trained_parameters()]
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip))
        loss = all_reduce_sum(torch.stack([output.loss.detach() for output in outputs]).sum())
        learning_rate = self._set_learning_rate(self.objective.learning_rate_factor(totals))
        usable = bool((totals.num_tokens > 0) & torch.isfinite(norm) & torch.isfinite(loss))
        if usable:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # frees memory for generation
        self._count_skips(usable)
        self.num_optimizer_steps += 1
        metrics = merge_metrics(all_gather(merge_metrics(output.metrics for output in outputs)))
        metrics["gradient/norm"] = Mean.of(norm)
        metrics["learning_rate"] = Mean.of(torch.tensor(learning_rate, dtype=torch.float64))
        metrics["steps/skipped"] = Count(torch.tensor(float(not usable)))
        return metrics

    def _gradient(
        self, batches: Sequence[MicroBatch], observer: StepObserver
    ) -> tuple[Totals, list[ObjectiveOutput]]:
        """Accumulate the gradient of one optimizer step."""
        from_policy = self.objective.totals_need_policy
        held: dict[int, TokenBatch] = {}
        totals = None
        budget = ActivationBudget(self.policy, offloads=self.config.activation_offload)
        self._hold(batches[:1], held, budget)
        if from_policy and len(batches) > 1:
            totals = self._estimated_totals(batches, held[0])
            if totals is None:
                self._hold(batches, held, budget)
        is_estimate = totals is not None
        if totals is None:
            totals = self._totals(batches, held, from_policy=from_policy)
        seen = _Seen(all_measurable=self._expects_measurable, keeps_totals=is_estimate)
        outputs = self._accumulate(batches, observer, held, totals, seen)
        if not all(all_gather(seen.was_right())):
            self.optimizer.zero_grad(set_to_none=True)
            self._expects_measurable = False
            return self._gradient(batches, observer)  # as if it had been known from the start
        found = self._of_all_ranks(seen.totals) if is_estimate else None
        counted = sum(all_gather(sum(output.num_tokens for output in outputs)))
        # if not, the policy itself gave a non-finite log-prob, which the data alone does not show
        fits = counted == int(totals.num_tokens)
        is_near = found is None or self._are_near(totals, found)
        self._may_estimate = self._may_estimate and is_near
        if not fits or not is_near:
            self.optimizer.zero_grad(set_to_none=True)
            totals = found or self._totals(batches, {}, from_policy=True)
            outputs = self._accumulate(batches, observer, {}, totals)
            counted = sum(all_gather(sum(output.num_tokens for output in outputs)))
        self._expects_measurable = counted == sum(
            all_gather(sum(len(batch.target) for batch in batches))
        )
        return totals, outputs

    def _accumulate(
        self,
        batches: Sequence[MicroBatch],
        observer: StepObserver,
        held: dict[int, TokenBatch],
        totals: Totals,
        seen: "_Seen | None" = None,
    ) -> list[ObjectiveOutput]:
        """Add up the gradient of all micro-batches, each weighted by the totals of the step.

        Uses up the held passes, and notes what is seen. Objectives that ask for no number of their
        own do not wait for a GPU here: while it computes one micro-batch, the next is prepared.
        """
        seen = seen or _Seen()
        outputs = []
        for number, batch in enumerate(batches):
            tokens = held.pop(number, None)
            if tokens is None:
                tokens = self._forward(batch)
            seen.note(self.objective, tokens)
            output = self.objective(tokens, totals, all_measurable=seen.all_measurable)
            output.loss.backward()
            output.metrics.update(observer.measure(tokens, batch, totals))
            outputs.append(output)
            del tokens  # frees its graph before the next forward pass
        return outputs

    def _hold(
        self, batches: Sequence[MicroBatch], held: dict[int, TokenBatch], budget: ActivationBudget
    ) -> None:
        """Run the first forward passes with gradient, as many as fit into memory together.

        Their results serve both for the totals of the step and for its gradient.
        """
        for number, batch in enumerate(batches):
            if number in held:
                continue
            if held and not budget.has_room():
                break
            with budget.measured():
                held[number] = self._forward(batch)

    def _estimated_totals(self, batches: Sequence[MicroBatch], sample: TokenBatch) -> Totals | None:
        """Return totals from the first micro-batch alone, if they seem near enough to the step's.

        Two halves of it must agree as well as the whole has to with the step. Counts are exact.
        """
        may_estimate = self._may_estimate and self.objective.estimates_totals
        if not may_estimate or self.policy.product_dtype is None:
            return None
        # first: it lays out all micro-batches, while a GPU still computes the sample
        counts = self._of_all_ranks(
            [
                self.objective.counts(self._token_batch(batch, batch.behavior_logp))
                for batch in batches
            ]
        )
        halves = [
            self._of_all_ranks([self.objective.totals(sample.select(sample.sequence % 2 == half))])
            for half in (0, 1)
        ]
        if not self._are_near(*halves):
            return None
        return replace(
            halves[0] + halves[1],
            num_tokens=counts.num_tokens,
            num_sequences=counts.num_sequences,
        )

    def _are_near(self, one: Totals, other: Totals) -> bool:
        """Whether weights from two totals differ by less than products are rounded."""
        assert self.policy.product_dtype is not None
        tolerance = torch.finfo(self.policy.product_dtype).eps * NEAR_FRACTION
        return self.objective.totals_distance(one, other) <= tolerance

    def _of_all_ranks(self, totals: Sequence[Totals]) -> Totals:
        of_ranks: list[Totals] = all_gather(functools.reduce(operator.add, totals))
        return functools.reduce(operator.add, of_ranks).to(self.policy.device)

    def _totals(
        self, batches: Sequence[MicroBatch], held: Mapping[int, TokenBatch], *, from_policy: bool
    ) -> Totals:
        """Return the totals of the step: from held passes, a pre-pass, or the data alone."""
        totals: list[Totals] = []
        for number, batch in enumerate(batches):
            tokens = held.get(number)
            if tokens is None:
                logp = batch.behavior_logp
                if from_policy:
                    with torch.no_grad():
                        logp = token_logprobs(
                            self.policy, batch, temperature=self.policy_temperature
                        ).logp
                tokens = self._token_batch(batch, logp)
            totals.append(self.objective.totals(tokens))
        return self._of_all_ranks(totals)

    def _forward(self, batch: MicroBatch) -> TokenBatch:
        """Run the policy with gradient; returns the input of the objective."""
        current = token_logprobs(
            self.policy,
            batch,
            temperature=self.policy_temperature,
            with_top=self.objective.needs_top_logp,
            entropy=EntropyUse.LEARNED if self.objective.entropy_coef else EntropyUse.REPORTED,
        )
        return self._token_batch(
            batch, current.logp, top_logp=current.top_logp, entropy=current.entropy
        )

    def _token_batch(
        self,
        batch: MicroBatch,
        logp: Tensor,
        *,
        top_logp: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> TokenBatch:
        with_top, with_anchor = self.objective.needs_top_logp, self.objective.needs_anchor
        proximal_logp, proximal_top_logp = batch.proximal_logp, batch.proximal_top_logp
        if proximal_logp is None and self.objective.needs_proximal:
            # in a pass of one step, the policy before the step is the proximal policy
            proximal_logp = logp.detach()
            proximal_top_logp = None if top_logp is None else top_logp.detach()
        return TokenBatch(
            logp=logp,
            behavior_logp=batch.behavior_logp,
            advantage=batch.advantage,
            sequence=batch.sequence,
            proximal_logp=proximal_logp,
            reference_logp=batch.reference_logp,
            entropy=entropy,
            top_logp=top_logp,
            behavior_top_logp=batch.behavior_top_logp if with_top else None,
            source=batch.source,
            anchor_logp=batch.anchor_logp if with_anchor else None,
            anchor_top_logp=batch.anchor_top_logp if with_top and with_anchor else None,
            proximal_top_logp=proximal_top_logp if top_logp is not None else None,
        )

    def _prepared(
        self,
        parts: Sequence[LazySequence[MicroBatch]],
        observer: StepObserver,
        *,
        steps_in_pass: int,
    ) -> list[Sequence[MicroBatch]]:
        """Return the micro-batches of steps of a pass on the device, with all they need."""
        is_proximal = self.objective.needs_proximal or observer.wants_initial
        needs_snapshot = steps_in_pass > 1 and is_proximal
        if not needs_snapshot and self.reference is None:
            # each is laid out when its turn comes: the GPU computes another one meanwhile
            return [part.mapped(lambda batch: batch.to(self.policy.device)) for part in parts]
        # the proximal policy is the one at the start of the pass, so this precedes all steps
        return [
            [self._with_fixed_logprobs(batch, observer, needs_snapshot) for batch in part]
            for part in parts
        ]

    def _with_fixed_logprobs(
        self, batch: MicroBatch, observer: StepObserver, needs_snapshot: bool
    ) -> MicroBatch:
        """Move a batch to the device, and fill in the log-probs that stay fixed during a pass."""
        batch = batch.to(self.policy.device)
        wants_initial = observer.wants_initial
        temperature, with_top = self.policy_temperature, self.objective.needs_top_logp
        fixed: dict[str, Tensor | None] = {}
        with torch.no_grad():
            if needs_snapshot:
                proximal = token_logprobs(
                    self.policy,
                    batch,
                    temperature=temperature,
                    with_top=with_top and self.objective.needs_proximal,
                )
                if wants_initial:
                    observer.keep_initial(batch.by_completion(proximal.logp))
                if self.objective.needs_proximal:
                    fixed["proximal_logp"] = proximal.logp
                    fixed["proximal_top_logp"] = proximal.top_logp
            if self.reference is not None:
                reference = token_logprobs(self.reference, batch, temperature=temperature)
                fixed["reference_logp"] = reference.logp
        return replace(batch, **fixed)

    def _set_learning_rate(self, factor: float) -> float:
        """Set the schedule's learning rate times the factor of the objective."""
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
                "training.learning_rate, or check tokens/nonfinite for broken log-probs."
            )


class _Seen:
    """What the micro-batches of a step turn out to be, while nothing waits for a GPU to know."""

    def __init__(self, *, all_measurable: bool = False, keeps_totals: bool = False) -> None:
        self.all_measurable = all_measurable
        """whether all tokens are taken to be measurable"""
        self.totals: list[Totals] = []
        self._keeps_totals = keeps_totals
        self._checks: list[Tensor] = []

    def note(self, objective: Objective, tokens: TokenBatch) -> None:
        """Note the tokens of a micro-batch."""
        if self.all_measurable:
            self._checks.append(objective.measurable(tokens).all())
        if self._keeps_totals:
            self.totals.append(objective.totals(tokens, all_measurable=self.all_measurable))

    def was_right(self) -> bool:
        """Whether all tokens are what they were taken to be; waits for the GPU."""
        return not self._checks or bool(torch.stack(self._checks).all())


def _prepare_layers(policies: Sequence[Policy], config: TrainingConfig) -> None:
    """Compile and checkpoint layers; a reference may share the model of the policy."""
    models = {policy.model: None for policy in policies}
    if config.compile:
        for model in models:
            compile_layers(model)
    if config.gradient_checkpointing:
        # a reference has no backward pass
        recompute_layers(policies[0].model, offload=config.activation_offload)
