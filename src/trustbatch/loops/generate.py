"""One batch: prompts, completions and grades, and more rounds where groups have equal rewards."""

import copy
import math
from dataclasses import dataclass, replace

from trustbatch.checkpoints.loop_state import Cursor
from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import GroupScorer
from trustbatch.rollout.collect import collect, refuse_repeated
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.tasks import LearningTask, Task
from trustbatch.types import Prompt, RolloutBatch, RolloutGroup, SamplingParams
from trustbatch.utils.system_errors import is_shortage


@dataclass(frozen=True, kw_only=True)
class BatchGenerator:
    """Generates and grades batches; what changes from batch to batch is passed in and returned."""

    config: Config
    task: Task
    policy: Policy
    scorer: GroupScorer
    sampling: SamplingParams

    def generate(self, engine: RolloutEngine, cursor: Cursor) -> tuple[RolloutBatch, Cursor]:
        """Return the batch whose prompts start at a cursor, and the cursor of the next one."""
        if self.config.rollout.dynamic_sampling:
            return self._generate_unequal(engine, cursor)
        groups, cursor = self._generate_round(engine, cursor)
        return RolloutBatch(groups=groups, num_tokens=_num_tokens(groups)), cursor

    def _generate_unequal(
        self, engine: RolloutEngine, cursor: Cursor
    ) -> tuple[RolloutBatch, Cursor]:
        """Return a batch of groups with unequal rewards; spare ones are left for the next batch.

        If there are too few after `rollout.max_sampling_rounds` rounds, groups of the last round
        fill the batch: all their advantages are zero.
        """
        size, max_rounds = self._batch_size, self.config.rollout.max_sampling_rounds
        kept, equal = list(cursor.spare), []
        num_groups = num_unequal = num_rounds = num_tokens = 0
        while len(kept) < size and num_rounds < max_rounds:
            groups, cursor = self._generate_round(engine, cursor)
            unequal = [group for group in groups if is_unequal(group)]
            equal = [group for group in groups if not is_unequal(group)]
            kept += unequal
            num_groups += len(groups)
            num_unequal += len(unequal)
            num_rounds += 1
            num_tokens += _num_tokens(groups)
        refuse_repeated([group.prompt for group in kept])
        num_missing = max(size - len(kept), 0)
        spare = tuple(kept[size:])
        metrics = {
            "dynamic/rounds": float(num_rounds),
            "dynamic/groups_sampled": float(num_groups),
            "dynamic/groups_kept": float(num_unequal),
            "dynamic/groups_spare": float(len(spare)),
            "dynamic/groups_missing": float(num_missing),
        }
        batch = RolloutBatch(
            groups=kept[:size] + equal[:num_missing], metrics=metrics, num_tokens=num_tokens
        )
        return batch, replace(cursor, spare=spare)

    def _generate_round(
        self, engine: RolloutEngine, cursor: Cursor
    ) -> tuple[list[RolloutGroup], Cursor]:
        """Generate and grade the completions of the next prompts."""
        rollout, first = self.config.rollout, cursor.num_prompts
        with memory_advice(self.config, self.task, "generate"):
            groups = collect(
                engine,
                self.policy,
                [self._prompt(first + number) for number in range(self._batch_size)],
                task=self.task,
                num_samples=rollout.samples_per_prompt,
                sampling=self.sampling,
                first_group=first,
                max_turns=rollout.max_turns,
            )
        graded = self.scorer.score(groups)
        cursor = replace(cursor, num_prompts=first + len(groups))
        if isinstance(self.task, LearningTask):
            self.task.observe(graded)
            # a copy: the task goes on to change its own
            cursor = replace(cursor, task_state=copy.deepcopy(self.task.state()))
        return graded, cursor

    def _prompt(self, index: int) -> Prompt:
        try:
            return self.task.prompt(index)
        except Exception as error:  # a user's code may raise anything; the cause stays attached
            if is_shortage(error):  # no fault of the task: there is advice for it
                raise
            raise ConfigError(
                f"prompt({index}) of the task {self.task.name} failed with "
                f"{type(error).__name__}: {error}; fix it, and the same command continues the run."
            ) from error

    @property
    def _batch_size(self) -> int:
        return self.config.rollout.prompts_per_step


def is_unequal(group: RolloutGroup) -> bool:
    """Whether the samples of a group have different rewards; those without a grade don't count."""
    rewards = {grade.reward for grade in group.grades if math.isfinite(grade.reward)}
    return len(rewards) > 1


def _num_tokens(groups: list[RolloutGroup]) -> int:
    return sum(len(c.token_ids) for group in groups for c in group.completions)
