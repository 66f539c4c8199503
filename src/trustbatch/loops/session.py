"""The parts of a run that the stages of its loop share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.save import Checkpointer
from trustbatch.config import Config
from trustbatch.evaluation.in_training import InTrainingEvaluation
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import RunFolder
from trustbatch.rewards import GroupScorer
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.tasks import Task
from trustbatch.tasks.base import close_task
from trustbatch.training.canary import Canary
from trustbatch.training.trainer import Trainer
from trustbatch.types import SamplingParams


@dataclass(kw_only=True)
class Session:
    """The parts of a run, and how far it is."""

    config: Config
    task: Task
    policy: Policy
    engine: RolloutEngine
    canary: Canary
    trainer: Trainer
    checkpointer: Checkpointer
    run: RunFolder
    scorer: GroupScorer
    evaluation: InTrainingEvaluation
    state: LoopState
    sampling: SamplingParams
    is_asked_to_stop: Callable[[], bool] = lambda: False
    """called after each step: whether the run shall end there, with a checkpoint if it keeps any"""

    def advantages(self, rewards: Tensor) -> Tensor:
        """Return the advantages [groups, samples] of rewards, as [advantage] says."""
        return self.config.advantage.build()(rewards)

    @contextmanager
    def engine_asleep(self) -> Iterator[None]:
        """Let an engine that can do so give its memory to the trainer meanwhile."""
        self.engine.sleep()
        yield
        self.engine.wake()

    def check_engine(self) -> None:
        """Before the first step: does the engine sample from the policy?"""
        self.canary.at_start(version=self.state.step)

    def publish(self, *, version: int) -> dict[str, float]:
        """Send the policy to the engine as a new version, and check that it samples from it."""
        self.engine.load_weights(self.policy.named_weights(), version=version)
        return self.canary.after_update(version=version)

    def close(self) -> None:
        """End all processes of the run, and let others use its folder."""
        self.checkpointer.close()
        self.scorer.close()
        close_task(self.task)
        self.evaluation.close()
        self.engine.close()
        self.run.close()
