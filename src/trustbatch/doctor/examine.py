"""The examination: sample, recompute and probe; nothing is trained or written."""

from collections.abc import Callable
from dataclasses import dataclass

from trustbatch.build.session import configured_sampling
from trustbatch.config import Config
from trustbatch.doctor.arithmetic import PLAIN, ArithmeticResult, examine_arithmetic
from trustbatch.doctor.distributions import SamplingDistribution
from trustbatch.doctor.examined_tokens import ExaminedTokens, sample_tokens
from trustbatch.doctor.probe import ProbeResult, probe_updates
from trustbatch.doctor.recompute import Layout, recompute
from trustbatch.doctor.sampling import (
    AnchorResult,
    SamplingResult,
    examine_anchor,
    examine_sampling,
)
from trustbatch.models.policy import Policy
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.tasks import Task
from trustbatch.types import Provenance, SamplingParams

DEFAULT_TOKENS = 2048
PROBE_TOKENS = 256


@dataclass(frozen=True)
class Measurements:
    """What is measured of any tokens: of a stack, and of rollouts that another engine recorded."""

    policy: str
    trainer_precision: str
    policy_temperature: float
    logprob_mode: str
    """as configured"""
    engine: Provenance
    num_sequences: int
    num_tokens: int
    arithmetic: ArithmeticResult
    sampling: SamplingResult


@dataclass(frozen=True)
class Examination(Measurements):
    """All measurements of a stack."""

    anchor: AnchorResult | None
    """None unless the engine records an anchor beside the sampled distribution"""
    probe: ProbeResult


def examine(
    config: Config,
    policy: Policy,
    engine: RolloutEngine,
    task: Task,
    *,
    num_tokens: int = DEFAULT_TOKENS,
    say: Callable[[str], None],
) -> Examination:
    """Examine a stack; the policy's weights are unchanged afterwards."""
    sampling = configured_sampling(config, policy)
    configured = SamplingDistribution.of(sampling)
    layout = Layout(config.training.micro_batch_tokens, config.training.share_prompts)
    plain_sampling = SamplingParams(
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprob_mode=sampling.logprob_mode,  # at T = 1 without truncation both modes agree
    )

    def sample(
        label: str, params: SamplingParams = plain_sampling, num: int = PROBE_TOKENS
    ) -> ExaminedTokens:
        say(f"sampling {num} tokens ({label})")
        return sample_tokens(engine, policy, task.prompt, params, num_tokens=num, label=label)

    plain = sample("plain", num=num_tokens)
    is_plain = configured == PLAIN and not sampling.records_anchor
    tokens = plain if is_plain else sample("configured", sampling, num=num_tokens)
    arithmetic = examine_arithmetic(policy, plain, layout, say=say)
    result = examine_sampling(
        policy,
        tokens,
        layout,
        configured=configured,
        trained=SamplingDistribution(config.policy_temperature),
        recorded_by_config=PLAIN if sampling.logprob_mode == "raw" else configured,
        engine_precision=arithmetic.explained_by,
        weights_agree=arithmetic.is_explained,
        say=say,
    )
    anchor = None
    if sampling.records_anchor:
        anchor = examine_anchor(
            policy,
            tokens,
            layout,
            expected=SamplingDistribution(config.policy_temperature),
            configured=configured,
            engine_precision=arithmetic.explained_by,
            say=say,
        )
    probe = probe_updates(
        engine,
        policy,
        sample,
        lambda probed: recompute(policy, probed, [PLAIN], layout)[PLAIN].logp,
    )
    return Examination(
        policy=policy.name,
        trainer_precision=policy.precision,
        policy_temperature=config.policy_temperature,
        logprob_mode=sampling.logprob_mode,
        engine=tokens.provenance,
        num_sequences=len(tokens.sequences),
        num_tokens=tokens.num_tokens,
        arithmetic=arithmetic,
        sampling=result,
        anchor=anchor,
        probe=probe,
    )
