"""Where the loop's batches come from: what a source is, and the one that takes turns with it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.loops.generate import BatchGenerator
from trustbatch.loops.session import Session
from trustbatch.observe.status import StepStatus
from trustbatch.training.trainer import Trainer
from trustbatch.types import Completion, RolloutBatch, RolloutGroup, TrainSequence
from trustbatch.utils.distributed import from_rank_zero


class BatchSource(Protocol):
    """Gives the loop its graded batches, in the order of their prompts."""

    def start(self) -> None:
        """Make sure that engines sample from the policy as it is, before the first batch."""
        ...

    def next_batch(self) -> RolloutBatch:
        """Return the batch of the next step."""
        ...

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take note of a finished step and its version; returns metrics of the generation."""
        ...

    def checkpoint_state(self) -> LoopState:
        """Return what a checkpoint of this moment must hold."""
        ...

    def broadcast(self, value: bool) -> bool:
        """Return rank 0's value on every rank. Collective."""
        ...

    def close(self) -> None:
        """End the generation."""
        ...


def batch_generator(session: Session) -> BatchGenerator:
    """Return what generates the batches of a session."""
    return BatchGenerator(
        config=session.config,
        task=session.task,
        policy=session.policy,
        scorer=session.scorer,
        sampling=session.sampling,
    )


class SyncSource:
    """Generation and training take turns.

    With `rollout.lag` = L, the batch trained at version v was sampled by version v - L (by version
    0 in the first L steps): batches wait in `state.pending`, as they would between two machines
    that work side by side. Groups that dynamic sampling left over are one version older.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._generator = batch_generator(session)
        self._status = StepStatus(
            session.run.status,
            step=session.state.step,
            steps=session.config.training.steps,
            buffer_room=session.config.rollout.lag,
            engine=session.config.rollout.engine,
        )
        self._num_tokens = 0

    def start(self) -> None:
        """Check the engine."""
        self.session.check_engine()

    def next_batch(self) -> RolloutBatch:
        """Generate until `rollout.lag` batches wait behind the next one."""
        config, state = self.session.config, self.session.state
        num_ahead = min(config.rollout.lag, config.training.steps - state.step - 1)
        self._status.generating()
        while len(state.pending) <= num_ahead:
            batch, state.cursor = self._generator.generate(self.session.engine, state.cursor)
            trained_at = state.step + len(state.pending) + 1
            if state.pending and config.run.has_ledger(trained_at, config.training.steps):
                # this version's own log-probs, which nobody can compute when it is trained on
                with self.session.engine_asleep():
                    batch = with_version_logp(batch, self.session.trainer, version=state.step)
            state.pending.append(batch)
            self._num_tokens += batch.num_tokens
        batch = state.pending.popleft()
        self._status.training(buffered_batches=len(state.pending))
        return batch

    def after_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return how much of the step was generation."""
        self._status.trained(self.session.state.step, metrics, num_tokens=self._num_tokens)
        share = metrics["time/generate_seconds"] / metrics["time/step_seconds"]
        return {"time/generation_busy_share": share}

    def checkpoint_state(self) -> LoopState:
        """Return the state as it is: nothing is being generated meanwhile."""
        return self.session.state

    def broadcast(self, value: bool) -> bool:
        """Return rank 0's value on every rank."""
        return from_rank_zero(value)

    def close(self) -> None:
        """Nothing is under way."""


def with_version_logp(batch: RolloutBatch, trainer: Trainer, *, version: int) -> RolloutBatch:
    """Add the trainer's log-probs to what its policy has just sampled at `version`. Collective."""

    def is_current(completion: Completion) -> bool:
        is_own = completion.provenance.policy == trainer.policy.name
        # groups that dynamic sampling left over are older
        return is_own and completion.all_versions == [version]

    logp = trainer.logprobs(
        [
            TrainSequence(
                prompt_token_ids=group.prompt_token_ids, completion=completion, advantage=0.0
            )
            for group in batch.groups
            for completion in group.completions
            if is_current(completion)
        ]
    )

    def added(group: RolloutGroup) -> RolloutGroup:
        completions = [
            replace(each, version_logp=_of_all_tokens(each, logp[each.key]))
            if each.key in logp
            else each
            for each in group.completions
        ]
        return replace(group, completions=tuple(completions))

    return replace(batch, groups=[added(group) for group in batch.groups])


def _of_all_tokens(completion: Completion, values: Tensor) -> Tensor:
    """Return values [num_sampled] of the policy's tokens as [n], with 0 for the environment's."""
    if completion.sampled is None:
        return values
    return values.new_zeros(len(completion.token_ids)).masked_scatter(completion.sampled, values)
