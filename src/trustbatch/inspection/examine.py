"""The examination of one batch: tokens, gradients and fresh rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trustbatch.batching.sequences import to_sequences
from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.inspection.candidates import (
    ALL,
    UNCLIPPED,
    Candidate,
    MeanEntropy,
    anchored,
    choose_candidates,
    refuse_without_reference,
    without_top,
    without_weights,
)
from trustbatch.inspection.findings import findings_of
from trustbatch.inspection.gradients import (
    Coordinates,
    FreshGradient,
    Gradient,
    cosine,
    drifts,
    mean_of,
)
from trustbatch.inspection.logged import read_logged
from trustbatch.inspection.reopen import ReopenedRun, reopened
from trustbatch.inspection.result import (
    FreshSummary,
    GradientSummary,
    Inspection,
    ObjectiveRow,
    ShownCompletion,
    ShownToken,
)
from trustbatch.inspection.steps import RunSteps, find_steps
from trustbatch.inspection.token_summary import (
    TokenCollector,
    TokenTable,
    bin_shares,
    summarize,
    weights_of,
)
from trustbatch.objectives.estimators import RatioMoments, effective_sample_size
from trustbatch.objectives.reinforce import Reinforce
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import rewards_of
from trustbatch.training.trainer import Trainer
from trustbatch.types import RolloutGroup, TrainSequence

FRESH_PARTS = 8
LEAST_PARTS = 3
"""a jackknife leaves one out, and the products of different parts take two"""
MAX_SHOWN_TOKENS = 160

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    folder: Path
    step: int | None = None
    """default: the step after the newest checkpoint"""
    objectives: tuple[str, ...] = (ALL,)
    fresh_samples: int | None = None
    """fresh completions of each prompt; default: 8 times as many as the run samples; 0: none"""
    first_mini_batch: bool = False
    """the first optimizer step as the trainer would take it, not one step on the whole batch"""


def inspect_run(request: Request, *, say: Say) -> Inspection:
    """Take the batch of a step through all objectives; the run folder is read only."""
    steps = find_steps(request.folder)
    step = steps.newest if request.step is None else request.step
    num_parts = _num_parts(request, steps.config)
    if step in steps.checkpoints:
        with reopened(steps.config, steps.checkpoints[step], say=say) as run:
            return _from_weights(request, steps, run, step, num_parts, say)
    if step in steps.rollouts:
        found = _from_log(request, steps, step)
        if found is not None:
            return found
    raise ConfigError(f"Step {step} of {request.folder} can't be inspected: {steps.describe()}.")


def _num_parts(request: Request, config: Config) -> int:
    size = config.rollout.samples_per_prompt
    if request.fresh_samples is None:
        return FRESH_PARTS
    parts = request.fresh_samples // size
    if request.fresh_samples and parts < LEAST_PARTS:
        raise ConfigError(
            f"--fresh-samples {request.fresh_samples} is too few for an error bar: groups have "
            f"{size} samples, so ask for {LEAST_PARTS * size} or more, or for 0."
        )
    return parts


def _from_weights(
    request: Request, steps: RunSteps, run: ReopenedRun, step: int, num_parts: int, say: Say
) -> Inspection:
    say(f"generating the batch of step {step}")
    batch = run.batch()
    sequences = _sequences(run, batch.groups)
    if not sequences:
        raise ConfigError(
            f"No completion of step {step} was graded: choose another step with --step."
        )
    widths = {_top_width(each) for each in sequences}
    has_top = len(widths) == 1 and None not in widths
    candidates = choose_candidates(steps.config.objective, request.objectives, has_top_logp=has_top)
    if run.trainer.reference is None:
        refuse_without_reference(candidates)
    fresh_groups: list[list[RolloutGroup]] = []
    for part in range(num_parts):
        say(f"generating fresh rollouts, part {part + 1} of {num_parts}")
        fresh_groups.append(run.fresh_groups(batch, part))
    run.engines.all.sleep()  # its memory is the trainer's now
    examiner = _Examiner(run.trainer, say)
    num_steps = run.config.training.mini_batches if request.first_mini_batch else 1
    with memory_advice(run.config, run.task, "train"):
        for candidate in candidates:
            examiner.take(candidate, sequences, num_steps=num_steps)
        fresh = examiner.fresh([(groups, _sequences(run, groups)) for groups in fresh_groups])
    assert examiner.table is not None
    inspection = _assemble(
        steps,
        step,
        examiner.table,
        rows=examiner.rows(),
        fresh=fresh,
        num_completions=len(examiner.table.sequence.unique()),
        coordinates=examiner.coordinates,
    )
    notes = _notes(request, steps, run, step, sequences, candidates, inspection)
    token_ids, tokenizer = examiner.table.token_ids, run.policy.tokenizer
    shown = show_completions(
        examiner.table,
        lambda index: tokenizer.batch_decode(token_ids[index, None].tolist()),
        list(examiner.weights.values()),
    )
    return replace(inspection, notes=notes, findings=findings_of(inspection), completions=shown)


def _sequences(run: ReopenedRun, groups: Sequence[RolloutGroup]) -> list[TrainSequence]:
    advantages = run.config.advantage.build()(rewards_of(groups))
    return to_sequences(groups, advantages)


def _top_width(sequence: TrainSequence) -> int | None:
    top = sequence.completion.top_token_ids
    return None if top is None else top.shape[1]


class _Examiner:
    """Gradients by the trainer's own forward pass, totals and accumulation, one after the other."""

    def __init__(self, trainer: Trainer, say: Say) -> None:
        self.trainer = trainer
        self.say = say
        self.coordinates = Coordinates(trainer.policy)
        self.table: TokenTable | None = None
        self.weights: dict[str, Tensor] = {}
        self._candidates: list[Candidate] = []
        self._gradients: dict[str, Gradient] = {}
        self._factors: dict[str, float] = {}
        self._fresh: FreshGradient | None = None
        self._entropies: list[Gradient] = []

    def take(
        self, candidate: Candidate, sequences: Sequence[TrainSequence], *, num_steps: int
    ) -> None:
        """Compute the gradient and the weights of one objective."""
        label, objective = candidate.label, candidate.objective
        self.say(f"gradient of {label}")
        tokens = TokenCollector()
        self.trainer.objective = objective
        with candidate.named_errors():
            totals = self.trainer.first_gradient(sequences, num_steps=num_steps, observer=tokens)
            self._gradients[label] = self._read()
            self.weights[label] = tokens.weights(objective, totals)
            self._factors[label] = objective.learning_rate_factor(totals)
        self._candidates.append(candidate)
        if self.table is None:
            self.table = tokens.table()

    def fresh(
        self, parts: Sequence[tuple[Sequence[RolloutGroup], Sequence[TrainSequence]]]
    ) -> FreshSummary | None:
        """Compute the gradients of reward and entropy on fresh rollouts, part by part."""
        graded = [(groups, sequences) for groups, sequences in parts if sequences]
        if len(graded) < LEAST_PARTS:
            return None
        gradients: list[Gradient] = []
        entropies: list[Tensor] = []
        for number, (_, sequences) in enumerate(graded, start=1):
            self.say(f"gradient of fresh rollouts, part {number} of {len(graded)}")
            self.trainer.objective = Reinforce()
            self.trainer.first_gradient(sequences, num_steps=1, observer=TokenCollector())
            gradients.append(self._read())
            tokens = TokenCollector()
            self.trainer.objective = MeanEntropy()
            self.trainer.first_gradient(sequences, num_steps=1, observer=tokens)
            self._entropies.append(self._read())
            entropies.append(tokens.entropy())
        self._fresh = FreshGradient(gradients)
        rewards = torch.cat([rewards_of(groups).flatten() for groups, _ in graded])
        return FreshSummary(
            num_parts=len(graded),
            num_completions=sum(len(sequences) for _, sequences in graded),
            mean_reward=float(rewards.nanmean()),
            has_signal=any(each.norm for each in gradients),
            norm=self._fresh.norm(),
            entropy=float(torch.cat(entropies).mean()),
        )

    def rows(self) -> list[ObjectiveRow]:
        """Return what was found, in the order in which the objectives were taken."""
        assert self.table is not None
        unclipped = drifts(self._gradients[UNCLIPPED], self._entropies)
        rows = []
        for candidate in self._candidates:
            label = candidate.label
            own = self._gradients[label]
            drift = drifts(own, self._entropies)
            fresh = self._fresh
            gradient = GradientSummary(
                norm=own.norm,
                learning_rate_factor=self._factors[label],
                cosines={other: cosine(own, each) for other, each in self._gradients.items()},
                fresh_cosine=None if fresh is None else fresh.cosine_with(own),
                entropy_drift=None if fresh is None else mean_of(drift),
                drift_beyond_unclipped=None if fresh is None else mean_of(drift - unclipped),
            )
            tokens = summarize(self.table, self.weights[label])
            rows.append(ObjectiveRow(label, candidate.is_own, tokens, gradient))
        return rows

    def _read(self) -> Gradient:
        gradient = self.coordinates.read()
        self.trainer.optimizer.zero_grad(set_to_none=True)
        return gradient


def _from_log(request: Request, steps: RunSteps, step: int) -> Inspection | None:
    """Weigh the tokens that were logged; None if there are none."""
    logged = read_logged(steps.rollouts[step])
    if logged is None:
        return None
    own = without_top(steps.config.objective)
    candidates = without_weights(choose_candidates(own, request.objectives, has_top_logp=False))
    rows, weights = [], []
    for each in candidates:
        with each.named_errors():
            totals = each.objective.totals(logged.batch)
            weights.append(weights_of(each.objective, [logged.batch], totals))
        summary = summarize(logged.table, weights[-1])
        rows.append(ObjectiveRow(each.label, each.is_own, summary, None))
    inspection = _assemble(
        steps, step, logged.table, rows=rows, fresh=None, num_completions=logged.num_completions
    )
    rollout = steps.config.rollout
    notes = [
        f"The weights before step {step} are gone, so there are no gradients: {steps.describe()}.",
        f"The tokens are those of {logged.num_completions} logged completions, of "
        f"{rollout.prompts_per_step * rollout.samples_per_prompt} in the step: what depends on the "
        "whole step, such as P3O's cap, is measured on them alone.",
    ]
    texts = logged.texts
    shown = show_completions(logged.table, lambda index: [texts[i] for i in index], weights)
    return replace(inspection, notes=notes, findings=findings_of(inspection), completions=shown)


def _assemble(
    steps: RunSteps,
    step: int,
    table: TokenTable,
    *,
    rows: list[ObjectiveRow],
    fresh: FreshSummary | None,
    num_completions: int,
    coordinates: Coordinates | None = None,
) -> Inspection:
    moments = RatioMoments.of(table.ratio[torch.isfinite(table.ratio)].log())
    return Inspection(
        run=str(steps.folder),
        step=step,
        is_logged=coordinates is None,
        num_completions=num_completions,
        num_tokens=len(table.ratio),
        num_with_advantage=int((table.advantage != 0).sum()),
        rollout_temperature=steps.config.rollout.temperature,
        policy_temperature=steps.config.policy_temperature,
        one_minus_ess=float(1 - effective_sample_size(moments)),
        bin_shares=bin_shares(table),
        rows=rows,
        fresh=fresh,
        num_coordinates=0 if coordinates is None else coordinates.num_kept,
        num_parameters=0 if coordinates is None else coordinates.num_all,
    )


def _notes(
    request: Request,
    steps: RunSteps,
    run: ReopenedRun,
    step: int,
    sequences: Sequence[TrainSequence],
    candidates: Sequence[Candidate],
    inspection: Inspection,
) -> list[str]:
    """Return what limits the numbers of a batch that was computed again."""
    config, notes = steps.config, []
    if step > config.training.steps:
        notes.append(f"The run ends before step {step}: this is the batch that it would take next.")
    if config.cluster is not None and config.cluster.in_flight:
        notes.append("With cluster.in_flight the run's own batch depends on timing: this is one.")
    if config.training.mini_batches > 1:
        notes.append(
            f"The gradients are those of the first of {config.training.mini_batches} mini-batches."
            if request.first_mini_batch
            else f"The run takes {config.training.mini_batches} optimizer steps on this batch; the "
            "gradients are those of one step on all of it, at the weights before the first."
        )
    if any(_lacks_anchor(each, run.config) for each in sequences):
        names = ", ".join(anchored(candidates))
        notes.append(
            "The batch was sampled without the model's own log-probs beside the sampler's, so what "
            f"pulls to the model pulls to the sampler here: {names}."
        )
    if inspection.num_coordinates < inspection.num_parameters:
        notes.append(
            f"Cosines and drifts are estimates from {inspection.num_coordinates:,} random "
            f"coordinates of {inspection.num_parameters:,}; norms are exact."
        )
    fresh = inspection.fresh
    if fresh is not None and not fresh.has_signal:
        notes.append("All groups of fresh rollouts have equal rewards: there is no gradient.")
    elif fresh is not None and fresh.norm is None:
        notes.append(
            "The fresh gradient can't be distinguished from noise, so there is no cosine with it: "
            "raise --fresh-samples."
        )
    return notes


def _lacks_anchor(sequence: TrainSequence, config: Config) -> bool:
    """Whether tokens were sampled from another distribution than the model's, without its own."""
    completion = sequence.completion
    provenance = completion.provenance
    if completion.anchor_logp is not None:
        return False
    if provenance.logprob_mode == "raw":
        return config.policy_temperature != 1.0
    is_truncated = provenance.top_p < 1.0 or provenance.top_k > 0
    return is_truncated or provenance.temperature != config.policy_temperature


def show_completions(
    table: TokenTable, decode: Callable[[list[int]], list[str]], weights: Sequence[Tensor]
) -> list[ShownCompletion]:
    """Return the right and the wrong completion whose weights vary most between objectives.

    `decode` returns the texts of the tokens with some indices; `weights` are [T], the last those of
    no clip.
    """
    by_objective = torch.stack(list(weights))  # [objectives, T]
    spread = (by_objective - by_objective[-1]).abs().nan_to_num(0.0).clamp(max=1.0).mean(0)
    num = int(table.sequence.max()) + 1
    total = torch.zeros(num, dtype=torch.float64).index_add(0, table.sequence, spread)
    advantage = torch.zeros(num, dtype=torch.float64)
    advantage[table.sequence] = table.advantage
    found = []
    for is_chosen in (advantage > 0, advantage < 0):
        if not bool(is_chosen.any()):
            continue
        chosen = int(total.masked_fill(~is_chosen, -1.0).argmax())
        index: list[int] = (table.sequence == chosen).nonzero().flatten().tolist()
        kept = index[:MAX_SHOWN_TOKENS]
        tokens = [
            ShownToken(text, float(table.ratio[i]), by_objective[:, i].tolist())
            for i, text in zip(kept, decode(kept), strict=True)
        ]
        found.append(ShownCompletion(float(advantage[chosen]), tokens, len(index) - len(kept)))
    return found
