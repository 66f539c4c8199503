"""The engines of a run: the trained policy's, those of second policies, and those of actors."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trustbatch.build.policies import load_for_engine
from trustbatch.config import Config
from trustbatch.errors import ConfigError, EngineError
from trustbatch.models.loading import default_precision, quiet_bars
from trustbatch.models.policy import Policy, same_tokenizer
from trustbatch.rollout.engine import Engines, EngineSettings, RolloutEngine
from trustbatch.rollout.mixture import MixedEngine, SecondPolicy, sampling_of
from trustbatch.rollout.registry import engine_info
from trustbatch.rollout.sampling import policy_seed
from trustbatch.rollout.wrappers import SharedEngine
from trustbatch.types import SamplingParams
from trustbatch.utils.cuda_memory import enable_expandable_segments
from trustbatch.utils.distributed import num_ranks, rank_device, this_rank

if TYPE_CHECKING:  # Ray is imported only where a run has [cluster]
    from trustbatch.cluster.engine_pool import EnginePool


def open_engines(
    config: Config, policy: Policy, replica: Policy | None, *, version: int
) -> Engines:
    """Start the engines that [rollout] describes.

    With several ranks every one has an engine on its `replica` of the policy, or the first one
    has the only engine; all of them share the completions.
    """
    if num_ranks() == 1:
        second_policies = load_second_policies(config, policy)  # refused before an engine starts
        engine = build_engine(config, policy, version=version, log_folder=config.run.path)
        return Engines(engine, _with_second_policies(config, engine, second_policies))
    info = engine_info(config.rollout.engine)
    info.check_ranks(info.table(config.rollout), num_ranks())
    num_owners = num_ranks() if replica is not None else 1
    own = own_and_second = None
    if this_rank() < num_owners:
        second_policies = load_second_policies(config, policy)
        own = build_engine(config, replica or policy, version=version, log_folder=config.run.path)
        own_and_second = _with_second_policies(config, own, second_policies)
    shared = SharedEngine(own, num_owners=num_owners, version=version)
    if replica is not None or own is None:
        # a replica may be older than the policy; an only engine has loaded the weights itself
        shared.load_weights(policy.named_weights(), version)
    return Engines(shared, SharedEngine(own_and_second, num_owners=num_owners, version=version))


def build_engine(
    config: Config, policy: Policy, *, version: int = 0, log_folder: Path | None = None
) -> RolloutEngine:
    """Build the engine that [rollout] describes, second policies left aside."""
    return _build(
        config,
        policy,
        seed=config.seed,
        version=version,
        precision=config.rollout.precision,
        trust_remote_code=config.model.trust_remote_code,
        log_folder=log_folder,
    )


def _with_second_policies(
    config: Config, engine: RolloutEngine, frozen_policies: list[Policy]
) -> RolloutEngine:
    """Let the policies of [[rollout.policies]] sample their shares beside the trained one."""
    others = [
        SecondPolicy(
            name=second.policy_name,
            engine=_build(
                config,
                frozen,
                seed=policy_seed(config.seed, second.policy_name),
                version=0,
                precision=second.precision or config.rollout.precision,
                trust_remote_code=second.trust_remote_code,
                log_folder=config.run.path,
            ),
            share=second.share,
            context_length=frozen.context_length,
            temperature=second.temperature,
            top_p=second.top_p,
            top_k=second.top_k,
        )
        for second, frozen in zip(config.rollout.policies, frozen_policies, strict=True)
    ]
    return MixedEngine(engine, others) if others else engine


def _build(
    config: Config,
    policy: Policy,
    *,
    seed: int,
    version: int,
    precision: str,
    trust_remote_code: bool,
    log_folder: Path | None,
) -> RolloutEngine:
    rollout = config.rollout
    info = engine_info(rollout.engine)
    settings = EngineSettings(
        seed=seed,
        version=version,
        precision=precision,
        kv_precision=rollout.kv_precision,
        max_sequences=rollout.max_sequences,
        prompts_per_call=rollout.prompts_per_call,
        top_logprobs=rollout.top_logprobs,
        logprob_mode=rollout.logprob_mode,
        anchor_temperature=recorded_anchor_temperature(config),
        trust_remote_code=trust_remote_code,
        device=rank_device(config.model.device),
        table=info.table(rollout),
        log_folder=log_folder,
    )
    return info.build(policy, settings)


def recorded_anchor_temperature(config: Config) -> float | None:
    """Return the anchor's temperature if some policy samples from another distribution."""
    rollout = config.rollout
    trained = SamplingParams(
        max_tokens=rollout.max_tokens,
        stop_token_ids=(),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        logprob_mode=rollout.logprob_mode,
        anchor_temperature=config.anchor_temperature,
    )
    second = [sampling_of(each, trained) for each in rollout.policies]
    records = any(sampling.records_anchor for sampling in (trained, *second))
    return config.anchor_temperature if records else None


def load_second_policies(config: Config, trained: Policy) -> list[Policy]:
    """Load the models of [[rollout.policies]]; refuses one with another tokenizer.

    For an engine with copies of its own they stay in host memory.
    """
    device = rank_device(config.model.device)
    shares_parameters = engine_info(config.rollout.engine).shares_parameters
    frozen = []
    for second in config.rollout.policies:
        name = second.policy_name
        precision = second.precision or config.model.precision
        try:
            policy = Policy.load(
                second.model,
                device=str(device) if shares_parameters else "cpu",
                precision=default_precision(device.type) if precision == "auto" else precision,
                trust_remote_code=second.trust_remote_code,
            )
        except ConfigError as error:
            raise ConfigError(f"The second policy {name!r} can't be loaded: {error}") from error
        policy.name = name
        same_tokenizer(policy, trained, top_logprobs=config.rollout.top_logprobs)
        frozen.append(policy.freeze())
    return frozen


def open_actor_engines(config: Config, version: int) -> Engines:
    """Start the engines of an actor: one process of [cluster], with a copy of the policy."""
    config = _on_own_device(config)
    if config.cluster is not None and config.cluster.in_flight:
        # it gets its parts of a batch already divided
        rollout = config.rollout.model_copy(update={"prompts_per_call": None})
        config = config.model_copy(update={"rollout": rollout})
    if engine_info(config.rollout.engine).expandable_segments:
        enable_expandable_segments()
    with quiet_bars():
        policy = _load_actor_policy(config)
    return open_engines(config, policy, None, version=version)


def _on_own_device(config: Config) -> Config:
    """Return the configuration for the GPU that Ray gave to this actor, its only one."""
    device = config.model.device
    if rank_device(device).type == "cpu":
        return config
    if not torch.cuda.is_available():
        raise EngineError(
            f"model.device = {device!r}, but Ray gave an engine no GPU: set cluster.engine_gpus to "
            "1, or to a part of one that several share."
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})


def _load_actor_policy(config: Config) -> Policy:
    """Load the policy where the engine needs it: in host memory if the engine copies it."""
    shares_parameters = engine_info(config.rollout.engine).shares_parameters
    if shares_parameters or rank_device(config.model.device).type == "cpu":
        return load_for_engine(config)
    precision = config.model.precision
    if precision == "auto":
        precision = default_precision("cuda")
    update = {"device": "cpu", "precision": precision}
    model = config.model.model_copy(update=update)
    return load_for_engine(config.model_copy(update={"model": model}))


def pooled_engines(pool: "EnginePool | None", *, version: int) -> Engines:
    """Return the pool as the engine of this rank; other ranks help to gather the weights."""
    if num_ranks() == 1:
        assert pool is not None
        return Engines(pool.trained(), pool)
    trained = pool.trained() if pool is not None else None
    return Engines(
        SharedEngine(trained, num_owners=1, version=version),
        SharedEngine(pool, num_owners=1, version=version),
    )
