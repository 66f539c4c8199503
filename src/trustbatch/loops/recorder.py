"""What a step leaves behind: metrics, completions, evaluations, checkpoints, progress."""

import time
from collections.abc import Sequence

from torch import Tensor

from trustbatch.loops.session import Session
from trustbatch.loops.sources import BatchSource
from trustbatch.observe.completion_log import logged_groups, readable_records, with_tokens
from trustbatch.observe.progress import Progress
from trustbatch.training.observation import Observation
from trustbatch.types import RolloutBatch, RolloutGroup


class Recorder:
    """Records each step, and decides whether the run ends after it."""

    def __init__(self, session: Session, source: BatchSource, progress: Progress) -> None:
        self.session = session
        self.source = source
        self.progress = progress
        self.is_stopping = False
        """whether the run was asked to stop, and ends with the last step that was recorded"""

    def start(self) -> None:
        """Evaluate the policy before its first step."""
        self.session.evaluation.before_first_step(self.session.state.step)

    def observation(self, batch: RolloutBatch) -> Observation:
        """Return what the coming step shall report of its tokens."""
        run, num_steps = self.session.config.run, self.session.config.training.steps
        step = self.session.state.step + 1
        recorded = []
        if run.logs_rollouts(step, num_steps):
            recorded = with_tokens(logged_groups(batch.groups, run), run)
        return Observation(
            ledger=run.has_ledger(step),
            recorded=frozenset(completion.key for completion in recorded),
        )

    def record(
        self,
        batch: RolloutBatch,
        advantages: Tensor,
        metrics: dict[str, float],
        observation: Observation,
    ) -> dict[str, float]:
        """Evaluate, write, save and show what is due; returns the metrics with the evaluation's."""
        session, config, step = self.session, self.session.config, self.session.state.step
        metrics = metrics | session.evaluation.after_step(step)
        is_last = step == config.training.steps
        if config.run.logs_rollouts(step, config.training.steps):
            records = readable_records(
                logged_groups(batch.groups, config.run),
                advantages,
                step=step,
                columns=observation.tokens,
                tokenizer=session.policy.tokenizer,
            )
            session.run.write_rollouts(step, records)
        session.run.write_metrics(step, metrics)  # they close the step for the trackers
        # asked of rank 0 alone: ranks may be asked at different moments
        self.is_stopping = not is_last and self.source.broadcast(session.is_asked_to_stop())
        if config.run.saves_checkpoint(step, is_last=is_last or self.is_stopping):
            session.run.sync()
            session.checkpointer.save(self.source.checkpoint_state())
        session.checkpointer.raise_failure()
        self.progress.update(step, metrics)
        return metrics

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        self.session.checkpointer.finish()


class StepTimer:
    """The times of one step, from its start to the moment when its version is published."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._generated = self._training = self._published = self._start

    def mark_generated(self) -> None:
        """The batch is there."""
        self._generated = time.perf_counter()

    def mark_training(self) -> None:
        """The update begins."""
        self._training = time.perf_counter()

    def mark_published(self) -> None:
        """The update is done, and the engines have it."""
        self._published = time.perf_counter()

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Return the times of a step that trained on these groups."""
        step = self._published - self._start
        train = self._published - self._training
        num_tokens = sum(c.num_sampled for group in groups for c in group.completions)
        return {
            "time/generate_seconds": self._generated - self._start,
            "time/train_seconds": train,
            "time/step_seconds": step,
            "time/trainer_busy_share": train / step,
            "time/tokens_per_second": num_tokens / step,
        }
