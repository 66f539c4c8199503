"""What a training run consists of, built from its configuration or restored from a checkpoint."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from trustbatch.config import Config
from trustbatch.engines import build_engine, load_second_policies, with_second_policies
from trustbatch.errors import ConfigError
from trustbatch.observe.run_folder import RunFolder
from trustbatch.policy import ADAPTER_FOLDER, Policy
from trustbatch.rollout.canary import NUM_PROMPTS, Canary
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.tasks import Task, build_task
from trustbatch.training.checkpoint import damaged, list_checkpoints, restore
from trustbatch.training.trainer import Trainer
from trustbatch.types import RolloutGroup, SamplingParams


@dataclass(kw_only=True)
class Session:
    """The parts of a run, and how far it is."""

    config: Config
    task: Task
    policy: Policy
    engine: RolloutEngine
    canary: Canary
    trainer: Trainer
    run: RunFolder
    step: int
    """steps trained so far, which is also the policy's version"""
    pending: deque[list[RolloutGroup]]
    """batches drawn but not yet trained on, oldest first"""

    @property
    def sampling(self) -> SamplingParams:
        """How this run draws tokens."""
        return configured_sampling(self.config, self.policy)


def open_session(config: Config, task: Task | None = None) -> Session:
    """Start a run, or continue it if its folder has a checkpoint of the same configuration."""
    if task is None:
        task = configured_task(config)
    run = RunFolder(config)
    checkpoints = list_checkpoints(run.checkpoints)
    policy = _load_checkpoint(config, checkpoints[-1]) if checkpoints else load_policy(config)
    trainer = Trainer(
        policy,
        config.build_objective(),
        config.training,
        policy_temperature=config.policy_temperature,
        seed=config.seed,
        reference=_load_reference(config, policy),
    )
    step, pending = 0, deque[list[RolloutGroup]]()
    if checkpoints:
        resumed = restore(checkpoints[-1], trainer)
        step, pending = resumed.step, deque(resumed.pending)
    second_policies = load_second_policies(config, policy)  # refused before an engine starts
    engine = build_engine(config, policy, version=step)
    try:
        canary = Canary(
            engine,
            policy,
            [task.prompt(index) for index in range(NUM_PROMPTS)],
            max_tokens=config.rollout.max_tokens,
            logprob_mode=config.rollout.logprob_mode,
            every=config.rollout.updates_per_canary,
        )
        all_engines = with_second_policies(config, engine, second_policies)
        run.start(step)
    except BaseException:
        engine.close()
        raise
    return Session(
        config=config,
        task=task,
        policy=policy,
        engine=all_engines,
        canary=canary,
        trainer=trainer,
        run=run,
        step=step,
        pending=pending,
    )


def configured_sampling(config: Config, policy: Policy) -> SamplingParams:
    """Return how [rollout] says that tokens are drawn."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        stop_token_ids=policy.stop_token_ids,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        top_logprobs=rollout.top_logprobs,
        logprob_mode=rollout.logprob_mode,
    )


def configured_task(config: Config) -> Task:
    """Build the task that [task] describes."""
    try:
        return build_task(config.task.name, seed=config.seed, **config.task.options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[task] can't be used: {error}") from error


def _load_checkpoint(config: Config, checkpoint: Path) -> Policy:
    try:
        if config.model.lora is not None:
            # what was trained is the adapters: the weights beside them are merged ones
            policy = load_policy(config)
            assert policy.adapters is not None
            policy.adapters.load(checkpoint / ADAPTER_FOLDER)
            return policy
        policy = _load_model(config, str(checkpoint))
    except ConfigError as error:
        raise damaged(checkpoint, error) from error
    policy.name = config.model.name
    return policy


def load_policy(config: Config) -> Policy:
    """Load the model of [model], with adapters where it has such a table."""
    policy = _load_model(config, config.model.name)
    if config.model.lora is not None:
        policy.add_adapters(config.model.lora, seed=config.seed)
    return policy


def _load_model(config: Config, name: str) -> Policy:
    """Load a model in the place and precision of [model]."""
    return Policy.load(
        name,
        device=config.model.device,
        precision=config.model.precision,
        trust_remote_code=config.model.trust_remote_code,
    )


def _load_reference(config: Config, policy: Policy) -> Policy | None:
    """Load the frozen reference where the objective asks for one."""
    if not config.build_objective().reference_kl_coef:
        return None
    name = config.training.reference_model or config.model.name
    if policy.adapters is not None and name == config.model.name:
        return policy.without_adapters()
    return _load_model(config, name).freeze()
