"""What a training run consists of, built from its configuration or restored from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trustbatch.checkpoints.load import newest_checkpoint, restore, unreadable
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.save import Checkpointer
from trustbatch.config import Config
from trustbatch.config.resume import check_resumable
from trustbatch.engines import Engines, open_engines
from trustbatch.errors import ConfigError
from trustbatch.evaluation.in_training import InTrainingEvaluation, configured_suite
from trustbatch.models.policy import Policy, default_precision
from trustbatch.observe.run_folder import ReadOnlyRunFolder, RunFolder
from trustbatch.rewards import Scorer
from trustbatch.rewards.shared import GroupScorer, SharedScorer
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.registry import engine_info
from trustbatch.rollout.wrappers import SharedEngine
from trustbatch.tasks import LearningTask, Task, fit_task, without_overlap
from trustbatch.training.canary import NUM_PROMPTS, Canary
from trustbatch.training.canary_reference import CanaryNotes
from trustbatch.training.sharding import shard
from trustbatch.training.trainer import Trainer
from trustbatch.types import SamplingParams
from trustbatch.utils.cuda_memory import enable_expandable_segments
from trustbatch.utils.distributed import num_ranks, rank_device, this_rank
from trustbatch.utils.terminal import LiveLine

if TYPE_CHECKING:  # Ray is imported only where a run has [cluster]
    from trustbatch.cluster.actor_pool import ActorPool
    from trustbatch.cluster.engine_pool import EnginePool
    from trustbatch.cluster.remote_scorer import RemoteScorer


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
    loop: LoopState
    engine_pool: EnginePool | None = None
    """engines in processes of their own, with [cluster]; on the first rank only"""
    reward_pool: ActorPool | None = None
    """reward workers, likewise"""
    canary_notes: CanaryNotes | None = None
    """what those engines are checked against"""
    is_asked_to_stop: Callable[[], bool] = lambda: False
    """asked after each step: whether the run shall end there, with a checkpoint to go on from"""

    @property
    def sampling(self) -> SamplingParams:
        """How this run samples tokens."""
        return configured_sampling(self.config, self.policy)

    def publish(self, *, version: int) -> dict[str, float]:
        """Give the engines the policy as a version, and see that they sample from it."""
        if self.canary_notes is None:
            self.engine.load_weights(self.policy.named_weights(), version=version)
            return self.canary.after_update(version=version)
        is_due = self.config.updates_per_canary and version % self.config.updates_per_canary == 0
        reference = self.canary_notes.note(version) if is_due else None
        if self.engine_pool is not None:
            self.engine_pool.expect(reference)
        self.engine.load_weights(self.policy.named_weights(), version=version)
        return {}


def open_session(config: Config, task: Task | None = None) -> Session:
    """Start a run, or continue it if its folder has a checkpoint of the same configuration.

    With several ranks all of them open it, each holds its part, and rank 0 writes the folder.
    """
    if engine_info(config.rollout.engine).expandable_segments:
        enable_expandable_segments()
    if task is None:
        task = configured_task(config)
    suite = configured_suite(config.evaluation)
    task = without_overlap(task, [each.task for each in suite])
    own_scorer = Scorer(task, config.reward, max_tokens=config.rollout.max_tokens)
    open_folder = RunFolder if this_rank() == 0 else ReadOnlyRunFolder
    run = open_folder(config.run, config.to_toml())
    check_resumable(config, run)
    checkpoint = newest_checkpoint(run.checkpoints)
    policy = _load_checkpoint(config, checkpoint) if checkpoint else load_model(config)
    replica = None
    one_per_rank = engine_info(config.rollout.engine).one_per_rank
    if num_ranks() > 1 and one_per_rank and config.cluster is None:
        replica = policy.replica(
            rank_device(config.model.device), precision=config.rollout.precision
        )
    task = fit_task(task, policy.encode, say=LiveLine().show if this_rank() == 0 else None)
    _add_adapters(config, policy)
    reference = _load_reference(config, policy)
    if num_ranks() > 1:
        _shard(config, policy, reference)
    trainer = Trainer(
        policy,
        config.objective.build(),
        config.training,
        policy_temperature=config.policy_temperature,
        seed=config.seed,
        reference=reference,
    )
    loop = restore(checkpoint, trainer) if checkpoint else LoopState()
    engine_pool = _open_fleet(config) if config.cluster is not None and this_rank() == 0 else None
    if config.cluster is None:
        engines = open_engines(config, policy, replica, version=loop.step)
    else:
        engines = _of_fleet(engine_pool, version=loop.step)
    scorer: GroupScorer = own_scorer
    reward_pool = None
    try:
        if engine_pool is not None and engine_pool.cluster.reward_workers:
            scorer = _open_scorer(config, task, own_scorer)
            reward_pool = scorer.pool
        elif num_ranks() > 1 and config.cluster is None:
            scorer = SharedScorer(own_scorer)
        canary_prompts = [task.prompt(index) for index in range(NUM_PROMPTS)]
        sampling = configured_sampling(config, policy)
        anchored = sampling if sampling.records_anchor else None
        canary = Canary(
            engines.trained,
            policy,
            canary_prompts,
            max_tokens=config.rollout.max_tokens,
            logprob_mode=config.rollout.logprob_mode,
            anchored=anchored,
            every=config.updates_per_canary,
        )
        notes = None
        if config.cluster is not None:
            notes = CanaryNotes(
                policy,
                canary_prompts,
                logprob_mode=config.rollout.logprob_mode,
                anchored=anchored,
            )
        # after the canary, whose prompts are the same whenever the run was started
        if isinstance(task, LearningTask) and loop.task:
            task.load_state(loop.task)
        evaluation = InTrainingEvaluation(config, suite, policy, engines.trained, run)
        run.start(loop.step)
        # only now: whoever holds the folder's lock may clean it
        checkpointer = Checkpointer(run.checkpoints, trainer, keep=config.run.keep_checkpoints)
    except BaseException:
        engines.all.close()
        scorer.close()
        raise
    return Session(
        config=config,
        task=task,
        policy=policy,
        engine=engines.all,
        canary=canary,
        trainer=trainer,
        checkpointer=checkpointer,
        run=run,
        scorer=scorer,
        evaluation=evaluation,
        loop=loop,
        engine_pool=engine_pool,
        reward_pool=reward_pool,
        canary_notes=notes,
    )


def _open_fleet(config: Config) -> EnginePool:
    from trustbatch.cluster.engine_pool import EnginePool

    return EnginePool(config)


def _of_fleet(engine_pool: EnginePool | None, *, version: int) -> Engines:
    """Return the engine pool as the engine of this rank; other ranks help to gather the weights."""
    if num_ranks() == 1:
        assert engine_pool is not None
        return Engines(engine_pool.trained(), engine_pool)
    trained = engine_pool.trained() if engine_pool is not None else None
    return Engines(
        SharedEngine(trained, num_owners=1, version=version),
        SharedEngine(engine_pool, num_owners=1, version=version),
    )


def _open_scorer(config: Config, task: Task, own: Scorer) -> RemoteScorer:
    from trustbatch.cluster.remote_scorer import RemoteScorer

    return RemoteScorer(config, task, own)


def configured_sampling(config: Config, policy: Policy) -> SamplingParams:
    """Return how [rollout] says that tokens are sampled."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        stop_token_ids=policy.stop_token_ids,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        top_logprobs=rollout.top_logprobs,
        logprob_mode=rollout.logprob_mode,
        anchor_temperature=config.anchor_temperature,
    )


def configured_task(config: Config) -> Task:
    """Build the task that [task] describes."""
    try:
        return config.task.build(seed=config.seed)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[task] can't be used: {error}") from error


def _load_checkpoint(config: Config, checkpoint: Path) -> Policy:
    if config.model.lora is not None:
        return load_model(config)  # what was trained is the adapters beside it
    try:
        policy = load_model(config, str(checkpoint))
    except ConfigError as error:
        raise unreadable(checkpoint, error) from error
    policy.name = config.model.name
    return policy


def load_policy(config: Config) -> Policy:
    """Load the model of [model], with adapters where it has such a table."""
    policy = load_model(config)
    _add_adapters(config, policy)
    return policy


def load_model(config: Config, name: str | None = None) -> Policy:
    """Load the model of [model], or another one in its place and precision."""
    device, precision = config.model.device, config.model.precision
    if num_ranks() > 1:
        # they first divide it, and only then move their parts to where they compute
        if precision == "auto":
            precision = default_precision(rank_device(device).type)
        device = "cpu"
    return Policy.load(
        name or config.model.name,
        device=device,
        precision=precision,
        trust_remote_code=config.model.trust_remote_code,
    )


def _add_adapters(config: Config, policy: Policy) -> None:
    if config.model.lora is not None:
        policy.add_adapters(config.model.lora, seed=config.seed)


def _shard(config: Config, policy: Policy, reference: Policy | None) -> None:
    device, offload = rank_device(config.model.device), config.training.cpu_offload
    shard(policy, device=device, offload=offload)
    if reference is None:
        return
    if reference.model is policy.model:
        reference.device = policy.device  # the same without its adapters
    else:
        shard(reference, device=device, offload=offload)


def _load_reference(config: Config, policy: Policy) -> Policy | None:
    """Load the frozen reference where the objective asks for one."""
    if not config.objective.build().reference_kl_coef:
        return None
    name = config.training.reference_model or config.model.name
    if policy.adapters is not None and name == config.model.name:
        return policy.without_adapters()
    return load_model(config, name).freeze()
