"""A run as it was before a step, in this process: its folder is read and never written.

Sampling is a pure function of (seed, version, prompt, sample, position), and a checkpoint restores
a run exactly. So the batch of the step after it is the one that the run trains on.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trustbatch.build.data import checked_task
from trustbatch.build.engines import open_engines
from trustbatch.build.fingerprints import fingerprint_files, refuse_changed_files
from trustbatch.build.policies import load_checkpoint, load_model
from trustbatch.build.session import build_trainer, configured_sampling, configured_task
from trustbatch.checkpoints.load import restore
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.manifest import verify
from trustbatch.config import Config
from trustbatch.config.objective import ObjectiveConfig
from trustbatch.config.tree import DEFAULT_TOP_LOGPROBS
from trustbatch.errors import CheckpointError, ConfigError
from trustbatch.evaluation.in_training import configured_suite
from trustbatch.loops.generate import BatchGenerator
from trustbatch.models.policy import Policy
from trustbatch.plan.shortage import memory_advice
from trustbatch.rewards import Scorer
from trustbatch.rollout.collect import collect
from trustbatch.rollout.engine import Engines
from trustbatch.rollout.registry import engine_info
from trustbatch.tasks import LearningTask, Task, without_overlap
from trustbatch.training.trainer import Trainer
from trustbatch.types import RolloutBatch, RolloutGroup, SamplingParams
from trustbatch.utils.cuda_memory import enable_expandable_segments


@dataclass(frozen=True, kw_only=True)
class ReopenedRun:
    """The parts of a run that generate a batch and compute its gradient."""

    config: Config
    task: Task
    trainer: Trainer
    engines: Engines
    scorer: Scorer
    sampling: SamplingParams
    """of the run, with the log-probs recorded that other objectives would use"""
    state: LoopState

    @property
    def policy(self) -> Policy:
        """The policy before the step."""
        return self.trainer.policy

    def batch(self) -> RolloutBatch:
        """Return the batch of the step: one that waited in the checkpoint, or a new one."""
        if self.state.pending:
            return self.state.pending[0]
        generator = BatchGenerator(
            config=self.config,
            task=self.task,
            policy=self.policy,
            scorer=self.scorer,
            sampling=self.sampling,
        )
        batch, _ = generator.generate(self.engines.all, self.state.cursor)
        return batch

    def fresh_groups(self, batch: RolloutBatch, part: int) -> list[RolloutGroup]:
        """Return graded groups of the batch's prompts, as large as its own, from the policy itself.

        Tokens are sampled at the policy's temperature without truncation; parts are independent.
        """
        sampling = replace(
            self.sampling,
            temperature=self.config.policy_temperature,
            top_p=1.0,
            top_k=0,
            top_logprobs=0,
            anchor_temperature=None,
            logprob_mode="processed",
        )
        prompts = [group.prompt for group in batch.groups]
        groups = collect(
            self.engines.trained,
            self.policy,
            # random numbers depend on the id
            [replace(prompt, id=f"inspect-{part}-{prompt.id}") for prompt in prompts],
            task=self.task,
            num_samples=self.config.rollout.samples_per_prompt,
            sampling=sampling,
            max_turns=self.config.rollout.max_turns,
        )
        named = [replace(each, prompt=p) for each, p in zip(groups, prompts, strict=True)]
        return self.scorer.grade(named)


@contextlib.contextmanager
def reopened(
    config: Config, checkpoint: Path | None, *, say: Callable[[str], None]
) -> Iterator[ReopenedRun]:
    """Build the parts of a run from a checkpoint, or from its initial model; they end with it."""
    _refuse_unreachable(config)
    config = config.model_copy(update={"cluster": None})
    if engine_info(config.rollout.engine).expandable_segments:
        enable_expandable_segments()
    if checkpoint is not None:
        _verify(checkpoint)
    suite = configured_suite(config.evaluation)
    task = without_overlap(configured_task(config), [each.task for each in suite])
    refuse_changed_files(config, checkpoint, fingerprint_files(config, task, suite), say)
    say(f"loading {config.model.name if checkpoint is None else checkpoint}")
    with memory_advice(config, task, "load"):
        policy = load_checkpoint(config, checkpoint) if checkpoint else load_model(config)
        task = checked_task(
            config,
            task,
            suite,
            count_tokens=policy.count_tokens,
            context_length=policy.context_length,
            say=say,
        )
        trainer = build_trainer(config, policy)
        state = LoopState()
        if checkpoint is not None:
            state = restore(checkpoint, trainer, with_optimizer=False)
    if isinstance(task, LearningTask) and state.cursor.task_state:
        task.load_state(state.cursor.task_state)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="trustbatch-"))
        recording = _recording(config, scratch)
        with memory_advice(config, task, "generate"):
            engines = open_engines(recording, policy, None, version=state.step)
        stack.callback(engines.all.close)
        scorer = Scorer(task, config.reward, max_tokens=config.rollout.max_tokens)
        stack.callback(scorer.close)
        yield ReopenedRun(
            config=config,
            task=task,
            trainer=trainer,
            engines=engines,
            scorer=scorer,
            sampling=configured_sampling(recording, policy),
            state=state,
        )


def _recording(config: Config, scratch: str) -> Config:
    """Return the configuration with all log-probs recorded that some objective uses.

    They change no token. A second policy may have too few ids for the most likely tokens. The logs
    of an engine go to `scratch`, not to the run folder.
    """
    top = config.rollout.top_logprobs
    if not config.rollout.policies:
        top = top or DEFAULT_TOP_LOGPROBS
    return config.model_copy(
        update={
            "objective": ObjectiveConfig(name="p3o"),  # has an anchor
            "rollout": config.rollout.model_copy(update={"top_logprobs": top}),
            "run": config.run.model_copy(update={"folder": scratch}),
        }
    )


def _refuse_unreachable(config: Config) -> None:
    info = engine_info(config.rollout.engine)
    if config.cluster is not None and not info.shares_parameters:
        raise ConfigError(
            f'This run has [cluster] and rollout.engine = "{info.name}", whose batches are not '
            "computed again in one process: inspect a step whose completions were logged with "
            "their tokens, or a run with the native engine."
        )
    info.require()


def _verify(checkpoint: Path) -> None:
    try:
        verify(checkpoint)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{checkpoint} can't be used ({error}): choose another step with --step."
        ) from error
