"""The examination: sample, recompute, probe. Nothing is trained and nothing is written."""

from collections.abc import Callable
from dataclasses import dataclass

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
from trustbatch.session import configured_sampling
from trustbatch.tasks import Task
from trustbatch.types import Provenance, SamplingParams

DEFAULT_TOKENS = 2048
PROBE_TOKENS = 256


@dataclass(frozen=True)
class Examination:
    """Everything that was measured."""

    policy: str
    trainer_precision: str
    policy_temperature: float
    logprob_mode: str
    """that the configuration asks for"""
    engine: Provenance
    num_sequences: int
    num_tokens: int
    arithmetic: ArithmeticResult
    sampling: SamplingResult
    anchor: AnchorResult | None
    """where the objective pulls to another distribution than the recorded one"""
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
    """Examine a stack; the policy's weights are afterwards what they were before."""
    sampling = configured_sampling(config, policy)
    configured = SamplingDistribution.of(sampling)
    layout = Layout(config.training.micro_batch_tokens, config.training.share_prompts)
    plain_sampling = SamplingParams(
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logprob_mode=sampling.logprob_mode,  # at T = 1 without a cut both record the same
    )

    def sample(
        label: str, how: SamplingParams = plain_sampling, wanted: int = PROBE_TOKENS
    ) -> ExaminedTokens:
        say(f"sampling {wanted} tokens ({label})")
        return sample_tokens(engine, policy, task.prompt, how, num_tokens=wanted, label=label)

    plain = sample("plain", wanted=num_tokens)
    is_plain = configured == PLAIN and not sampling.records_anchor
    samples = plain if is_plain else sample("configured", sampling, wanted=num_tokens)
    arithmetic = examine_arithmetic(policy, plain, layout, say=say)
    result = examine_sampling(
        policy,
        samples,
        layout,
        configured=configured,
        policy_law=SamplingDistribution(config.policy_temperature),
        recorded_by_config=PLAIN if sampling.logprob_mode == "raw" else configured,
        engine_precision=arithmetic.explained_by,
        weights_agree=arithmetic.is_explained,
        say=say,
    )
    anchor = None
    if sampling.records_anchor:
        anchor = examine_anchor(
            policy,
            samples,
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
        lambda sampled: recompute(policy, sampled, [PLAIN], layout)[PLAIN].logp,
    )
    return Examination(
        policy=policy.name,
        trainer_precision=policy.precision,
        policy_temperature=config.policy_temperature,
        logprob_mode=sampling.logprob_mode,
        engine=samples.provenance,
        num_sequences=len(samples.sequences),
        num_tokens=samples.num_tokens,
        arithmetic=arithmetic,
        sampling=result,
        anchor=anchor,
        probe=probe,
    )
