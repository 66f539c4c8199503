"""The session of a run, built from its configuration or restored from a checkpoint."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trustbatch.build.data import checked_task
from trustbatch.build.engines import open_actor_engines, open_engines, pooled_engines
from trustbatch.build.fingerprints import (
    Fingerprints,
    fingerprint_files,
    fingerprint_prompts,
    refuse_changed_files,
    refuse_changed_prompts,
)
from trustbatch.build.policies import (
    add_adapters,
    build_replica,
    load_checkpoint,
    load_model,
    load_reference,
    shard_over_ranks,
)
from trustbatch.checkpoints.load import newest_checkpoint, restore
from trustbatch.checkpoints.loop_state import LoopState
from trustbatch.checkpoints.save import Checkpointer
from trustbatch.config import Config
from trustbatch.config.resume import check_checkpoint, check_resumable
from trustbatch.errors import ConfigError
from trustbatch.evaluation.in_training import InTrainingEvaluation, configured_suite
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.loops.session import Session
from trustbatch.loops.sources import BatchSource, SyncSource
from trustbatch.models.policy import Policy
from trustbatch.observe.run_folder import ReadOnlyRunFolder, RunFolder
from trustbatch.observe.trackers import require_packages
from trustbatch.rewards import GroupScorer, Scorer, SharedScorer
from trustbatch.rollout.engine import Engines
from trustbatch.rollout.registry import engine_info
from trustbatch.tasks import LearningTask, Task, without_overlap
from trustbatch.training.canary import NUM_PROMPTS, Canary, CanaryRecorder
from trustbatch.training.optimizer import create_moments
from trustbatch.training.trainer import Trainer
from trustbatch.types import SamplingParams
from trustbatch.utils.cuda_memory import enable_expandable_segments
from trustbatch.utils.distributed import num_ranks, on_rank_zero, this_rank
from trustbatch.utils.terminal import LiveLine

if TYPE_CHECKING:
    from trustbatch.cluster.actor_pool import ActorPool
    from trustbatch.cluster.engine_pool import EnginePool


def build_session(config: Config, task: Task | None = None) -> Session:
    """Start a run, or continue it if its folder has a checkpoint of the same configuration.

    With several ranks all of them build it, each holds its part, and rank 0 writes the folder.
    """
    if engine_info(config.rollout.engine).expandable_segments:
        enable_expandable_segments()
    require_packages(config.run.trackers)
    task = configured_task(config) if task is None else task
    suite = configured_suite(config.evaluation)
    task = without_overlap(task, [each.task for each in suite])
    own_scorer = Scorer(
        task, config.reward, max_tokens=config.rollout.max_tokens, folder=config.run.path
    )
    try:
        return _build(config, task, suite, own_scorer)
    except BaseException:
        own_scorer.close()
        raise


def _build(config: Config, task: Task, suite: list[EvaluatedTask], own_scorer: Scorer) -> Session:
    open_folder = RunFolder if this_rank() == 0 else ReadOnlyRunFolder
    run = open_folder(config.run, config.to_toml())
    check_resumable(config, run)
    checkpoint = newest_checkpoint(run.checkpoints)
    if checkpoint is not None:
        check_checkpoint(config, checkpoint)
    files = fingerprint_files(config, task, suite)
    refuse_changed_files(config, checkpoint, files, _say)
    if this_rank() == 0 and not (config.cluster and config.cluster.reward_workers):
        # they come up while the model is loaded and the first completions are sampled
        own_scorer.start(config.rollout.prompts_per_step * config.rollout.samples_per_prompt)
    policy = load_checkpoint(config, checkpoint) if checkpoint else load_model(config)
    replica = build_replica(config, policy)
    task = _checked(config, task, suite, policy)
    fingerprints = fingerprint_prompts(files, task)
    refuse_changed_prompts(config, checkpoint, fingerprints, _say)
    trainer = build_trainer(config, policy)
    create_moments(trainer.optimizer)  # before the engines take memory
    state = restore(checkpoint, trainer) if checkpoint else LoopState()
    workers = _start_workers(config, task, policy, replica, own_scorer, version=state.step)
    try:
        return _assemble(config, task, trainer, state, suite, run, workers, fingerprints)
    except BaseException:
        workers.engines.all.close()
        workers.scorer.close()
        raise


def _checked(config: Config, task: Task, suite: list[EvaluatedTask], policy: Policy) -> Task:
    """Return the task after a check of all problems; rank 0 tokenizes them for all ranks."""
    return checked_task(
        config,
        task,
        suite,
        count_tokens=lambda prompts: on_rank_zero(lambda: policy.count_tokens(prompts)),
        context_length=policy.context_length,
        say=LiveLine().show if this_rank() == 0 else lambda _: None,
    )


def _say(sentence: str) -> None:
    if this_rank() == 0:
        LiveLine().warn(sentence)


def build_source(session: Session) -> BatchSource:
    """Return where the batches of a session come from."""
    if session.config.cluster is None:
        return SyncSource(session)
    from trustbatch.cluster.source import ClusterSession, ClusterSource

    assert isinstance(session, ClusterSession)
    return ClusterSource(session)


def configured_task(config: Config) -> Task:
    """Build the task that [task] describes."""
    try:
        return config.task.build(seed=config.seed)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[task] can't be used: {error}") from error


def configured_sampling(config: Config, policy: Policy) -> SamplingParams:
    """Return the sampling parameters that [rollout] describes."""
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


def build_trainer(config: Config, policy: Policy) -> Trainer:
    """Build the trainer of a loaded model, with the adapters and the reference that it needs."""
    add_adapters(config, policy)
    reference = load_reference(config, policy)
    if num_ranks() > 1:
        shard_over_ranks(config, policy, reference)
    return Trainer(
        policy,
        config.objective.build(),
        config.training,
        policy_temperature=config.policy_temperature,
        seed=config.seed,
        reference=reference,
    )


@dataclass(frozen=True, kw_only=True)
class _Workers:
    """What generates and grades, in this process or in others."""

    engines: Engines
    scorer: GroupScorer
    engine_pool: "EnginePool | None" = None
    reward_pool: "ActorPool | None" = None


def _start_workers(
    config: Config,
    task: Task,
    policy: Policy,
    replica: Policy | None,
    own_scorer: Scorer,
    *,
    version: int,
) -> _Workers:
    if config.cluster is None:
        engines = open_engines(config, policy, replica, version=version)
        scorer = SharedScorer(own_scorer) if num_ranks() > 1 else own_scorer
        return _Workers(engines=engines, scorer=scorer)
    # Ray is imported only where a run has [cluster]
    from trustbatch.cluster.engine_pool import EnginePool
    from trustbatch.cluster.remote_scorer import RemoteScorer

    pool = EnginePool(config, open_actor_engines) if this_rank() == 0 else None
    engines = pooled_engines(pool, version=version)
    if pool is None or not config.cluster.reward_workers:
        return _Workers(engines=engines, scorer=own_scorer, engine_pool=pool)
    try:
        remote = RemoteScorer(config, task, own_scorer)
    except BaseException:
        engines.all.close()
        raise
    return _Workers(engines=engines, scorer=remote, engine_pool=pool, reward_pool=remote.pool)


def _assemble(
    config: Config,
    task: Task,
    trainer: Trainer,
    state: LoopState,
    suite: list[EvaluatedTask],
    run: RunFolder,
    workers: _Workers,
    fingerprints: Fingerprints,
) -> Session:
    policy, engines = trainer.policy, workers.engines
    sampling = configured_sampling(config, policy)
    checked: dict[str, Any] = {
        "prompts": [task.prompt(index) for index in range(NUM_PROMPTS)],
        "logprob_mode": config.rollout.logprob_mode,
        "anchored": sampling if sampling.records_anchor else None,
    }
    canary = Canary(
        engines.trained,
        policy,
        max_tokens=config.rollout.max_tokens,
        every=config.updates_per_canary,
        **checked,
    )
    # after the canary, whose prompts are the same whenever the run was started
    if isinstance(task, LearningTask) and state.cursor.task_state:
        task.load_state(state.cursor.task_state)
    evaluation = InTrainingEvaluation(config, suite, policy, engines.trained, run)
    run.start(state.step)
    parts: dict[str, Any] = {
        "config": config,
        "task": task,
        "policy": policy,
        "engine": engines.all,
        "canary": canary,
        "trainer": trainer,
        # only now: whoever holds the folder's lock may clean it
        "checkpointer": Checkpointer(
            run.checkpoints,
            trainer,
            keep=config.run.keep_checkpoints,
            config_toml=config.to_toml(),
            fingerprints=fingerprints.to_record(),
        ),
        "run": run,
        "scorer": workers.scorer,
        "evaluation": evaluation,
        "state": state,
        "sampling": sampling,
    }
    if config.cluster is None:
        return Session(**parts)
    from trustbatch.cluster.source import ClusterSession

    return ClusterSession(
        **parts,
        canary_recorder=CanaryRecorder(policy, **checked),
        engine_pool=workers.engine_pool,
        reward_pool=workers.reward_pool,
    )
