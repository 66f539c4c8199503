"""The checks of an examination: what differs, what that does to training, what to change."""

from dataclasses import dataclass
from enum import StrEnum

from trustbatch.config import Config
from trustbatch.doctor.arithmetic import NOISE_FACTOR, PLAIN
from trustbatch.doctor.distributions import Mismatch, SamplingDistribution
from trustbatch.doctor.examine import Examination, Measurements
from trustbatch.doctor.examined_tokens import UNKNOWN
from trustbatch.doctor.recompute import FP8_KV
from trustbatch.doctor.sampling import MAX_Z
from trustbatch.doctor.wording import STACK, Wording
from trustbatch.types import Provenance

STALE_BELOW = 0.5
"""share of a weight update's effect below which the engine has not loaded it"""


class Status(StrEnum):
    """The result of a check."""

    GOOD = "ok"
    CONFIGURED = "off-policy by configuration"
    FAULT = "FAULT"
    UNKNOWN = "not tested"


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    check: str
    measured: str
    status: Status
    cause: str | None = None
    """short name of the cause, for programs"""
    part: Mismatch | None = None
    """its contribution to the log-ratios"""
    sentences: str = ""
    """cause, effect on training and remedy; empty if there is nothing to report"""


def check_weights(e: Examination) -> Finding:
    """Check that the engine has the trainer's weights, and loads updates."""
    arithmetic, probe, engine = e.arithmetic, e.probe, e.engine
    differs = arithmetic.mismatch.mean_abs
    measured = (
        f"engine and trainer differ by mean |l| = {differs:.2g} at T = 1 (noise: up to "
        f"{arithmetic.uncertainty:.1g}); a test update shows {probe.share:.0%} of its effect"
    )

    def fault(cause: str, sentences: str) -> Finding:
        part = None if arithmetic.is_explained else e.sampling.parts["arithmetic"]
        return Finding("weights", measured, Status.FAULT, cause, part, sentences)

    if not probe.share >= STALE_BELOW:
        claims = ", though it reports the new version" if probe.reports_version else ""
        return fault(
            "stale_weights",
            f"The engine ignores weight updates: it shows {probe.share:.0%} of the effect of a "
            f"test update{claims}. Its completions come from old weights, and drift further from "
            f"the policy with every step. Fix the engine's load_weights ({engine.engine}); "
            'rollout.engine = "native" samples from the trainer\'s own parameters.',
        )
    if not arithmetic.is_explained:
        is_fixed = probe.residual_after <= NOISE_FACTOR * arithmetic.uncertainty
        advice = (
            "Sending the weights again fixes it, so the engine started from other weights: start "
            "it from model.name, or from the checkpoint that the run continues from."
            if is_fixed
            else "Weight updates arrive but do not fix it, so part of the engine's model is "
            "computed differently or never written: compare its layers with the trainer's one by "
            "one, and look for names that its load_weights skips."
        )
        return fault(
            "wrong_weights",
            f"The engine's weights are not the trainer's: log-probs of the same tokens differ by "
            f"{differs:.2g} on average, and neither a precision nor a sampling setting explains "
            f"it. The model is then trained on another model's samples. {advice}",
        )
    usual = max(differs, arithmetic.uncertainty)
    if probe.residual > NOISE_FACTOR * usual and arithmetic.own_settings is None:
        return fault(
            "partial_update",
            f"Weight updates arrive only in part: after a test update engine and trainer differ by "
            f"mean |l| = {probe.residual:.2g}, before it by {differs:.2g}. Some parameters keep "
            "their old values while the rest moves on: look for names that the engine's "
            "load_weights skips.",
        )
    return Finding("weights", measured, Status.GOOD)


def check_precision(e: Measurements) -> Finding:
    """Check that engine and trainer compute in the same precision."""
    arithmetic, engine = e.arithmetic, e.engine
    effects = ", ".join(
        f"in {name} mean |l| = {effect.mean_abs:.2g}, 1-ESS = {effect.one_minus_ess:.2g}"
        for name, effect in arithmetic.effects.items()
    )
    measured = (
        f"engine {engine.precision}{_of_cache(engine)}, trainer {e.trainer_precision}; the trainer "
        "against itself: "
        f"{effects}"
    )
    found = arithmetic.explained_by
    if found is None:
        known = arithmetic.is_explained
        return Finding("precision", measured, Status.GOOD if known else Status.UNKNOWN)
    # FP8 keys and values are tried only where they are declared; who says nothing hides nothing
    declared = found == FP8_KV or engine.precision in (found, UNKNOWN)
    effect = arithmetic.mismatch
    return Finding(
        "precision",
        f"{measured}; the engine's errors are {arithmetic.likeness[found]:.0%} like {found}",
        Status.CONFIGURED if declared else Status.FAULT,
        "precision",
        effect,
        f"The engine computes in {found}"
        + ("" if declared else f", though it reports {engine.precision}")
        + f"; the trainer in {e.trainer_precision}. Tokens are sampled from a rounded policy: "
        f"1-ESS = {effect.one_minus_ess:.2g} at T = 1 from this alone. P3O measures that and "
        "trusts the batch less; objectives without a correction treat it as on-policy data. "
        + _remedy(found, e.trainer_precision),
    )


def _of_cache(engine: Provenance) -> str:
    if engine.kv_precision == "auto":
        return ""
    return f" with keys and values in {engine.kv_precision}"


def _remedy(precision: str, trainer_precision: str) -> str:
    if precision == FP8_KV:
        return 'Set rollout.kv_precision = "auto" to remove it.'
    return f"Run the engine in {trainer_precision} to remove it."


def check_temperature(e: Measurements, words: Wording = STACK) -> Finding:
    """Check that tokens are sampled at the temperature of the policy."""
    sampling = e.sampling
    sampled, configured, policy = sampling.sampled, sampling.configured, e.policy_temperature
    measured = (
        f"tokens fit {sampled} (z = {sampling.z[sampled]:+.1f}); the policy is trained at "
        f"T = {policy:g}"
    )
    part = sampling.parts["temperature"]
    if sampling.is_tested and sampled.temperature != configured.temperature:
        return Finding(
            "temperature",
            measured,
            Status.FAULT,
            "temperature",
            part,
            f"Tokens look sampled at T = {sampled.temperature:g}, but {words.temperature_is} "
            f"{configured.temperature:g} (z = {sampling.z[configured]:+.0f} against it). "
            f"{words.own_settings}",
        )
    if sampling.is_tested and not abs(sampling.z[sampled]) <= MAX_Z:
        return Finding(
            "temperature",
            measured,
            Status.FAULT,
            "unknown_distribution",
            None,
            "The tokens fit no temperature, top-k or top-p that was tried, though the weights "
            "agree: something else changes the engine's distribution, such as penalties, banned "
            "tokens or guided decoding. Turn that off in the engine.",
        )
    if sampled.temperature != policy:
        return Finding(
            "temperature",
            measured,
            Status.CONFIGURED,
            "temperature",
            part,
            f"T = {sampled.temperature:g} {words.by_temperature}, while the policy is trained at "
            f"T = {policy:g}: 1-ESS = {part.one_minus_ess:.2g} from this alone. "
            f"{words.other_temperature}",
        )
    status = Status.GOOD if sampling.is_tested else Status.UNKNOWN
    return Finding("temperature", measured, status)


def check_support(e: Measurements, words: Wording = STACK) -> Finding:
    """Check that tokens are sampled without truncation, and log-probs renormalized."""
    sampling = e.sampling
    sampled, configured = sampling.sampled, sampling.configured
    measured = (
        f"tokens fit {sampled.support}; {sampling.num_outside} of {e.num_tokens} are outside of "
        f"the configured support ({configured.support})"
    )
    part = sampling.parts["support"]
    if sampling.is_tested and sampled != SamplingDistribution(
        sampled.temperature, configured.top_k, configured.top_p
    ):
        return Finding(
            "top-k, top-p",
            measured,
            Status.FAULT,
            "support",
            part,
            f"Tokens look sampled with {sampled.support}, but {configured.support} "
            f"{words.support_is}. Tokens outside of it are never sampled, so nothing is learned "
            f"about them, and no ratio shows it. {words.own_settings}",
        )
    if _is_not_renormalized(e):
        return Finding(
            "top-k, top-p",
            measured,
            Status.FAULT,
            "support",
            part,
            f"Tokens are sampled with {sampled.support}, but the recorded log-probs are not "
            f"renormalized over it: they are those of {sampling.recorded} (mean residual "
            f"{sampling.residuals[sampling.recorded]:.1g}, renormalized "
            f"{sampling.residuals[sampled]:.1g}). The ratios miss the truncated mass and look "
            f"on-policy (E[r] = {sampling.total.mean_ratio:.3f}, but actually "
            f"{sampling.true.mean_ratio:.3f}). Have the engine return processed log-probs, or "
            f"{words.no_truncation}.",
        )
    if not sampled.is_full:
        return Finding(
            "top-k, top-p",
            measured,
            Status.CONFIGURED,
            "support",
            part,
            f"{sampled.support} {words.by_support}: tokens outside of it are never sampled, and "
            "those inside are sampled more often than by the policy: "
            f"E[r] = {part.mean_ratio:.3f} and 1-ESS = {part.one_minus_ess:.2g} from this alone. "
            f"{words.no_truncation.capitalize()} to remove it.",
        )
    status = Status.GOOD if sampling.is_tested else Status.UNKNOWN
    return Finding("top-k, top-p", measured, status)


def check_logprob_mode(e: Measurements) -> Finding:
    """Check that recorded log-probs are those of the distribution sampled from."""
    sampling = e.sampling
    sampled, recorded = sampling.sampled, sampling.recorded
    residual = sampling.residuals[recorded]
    measured = (
        f"recorded log-probs fit {recorded} (mean residual {residual:.1g}); tokens fit {sampled}"
    )
    if not sampling.is_tested:
        return Finding("log-prob mode", measured, Status.UNKNOWN)
    if residual > _noise(e, recorded):
        return Finding(
            "log-prob mode",
            measured,
            Status.FAULT,
            "unknown_logprobs",
            sampling.parts["arithmetic"],
            f"The recorded log-probs fit nothing that was tried (mean residual {residual:.2g}), "
            "though they agree at T = 1 without truncation: the engine changes them when it "
            "applies sampling settings. Every ratio of such a batch is wrong.",
        )
    if recorded == sampled or _is_not_renormalized(e):
        return Finding("log-prob mode", measured, Status.GOOD)
    by_config = e.logprob_mode == "raw" and recorded == PLAIN
    return Finding(
        "log-prob mode",
        measured,
        Status.CONFIGURED if by_config else Status.FAULT,
        "logprob_mode",
        sampling.parts["logprob_mode"],
        f"The recorded log-probs are those of {recorded}, the tokens are sampled from {sampled}"
        + (' (rollout.logprob_mode = "raw")' if by_config else "")
        + f". The ratios show 1-ESS = {sampling.total.one_minus_ess:.1g}, but it is actually "
        f"{sampling.true.one_minus_ess:.1g}: no objective can see or correct this mismatch. "
        + (
            'Set rollout.logprob_mode = "processed".'
            if by_config
            else "Have the engine return processed log-probs (vLLM: logprobs_mode = "
            '"processed_logprobs").'
        ),
    )


def _noise(e: Measurements, distribution: SamplingDistribution) -> float:
    """Return the residual up to which recorded log-probs fit a distribution."""
    noise = e.arithmetic.uncertainty
    if e.arithmetic.explained_by:
        noise = max(noise, e.arithmetic.effects[e.arithmetic.explained_by].mean_abs)
    return NOISE_FACTOR * noise / min(distribution.temperature, 1.0)


def check_anchor(e: Examination) -> list[Finding]:
    """Check that a recorded anchor is the policy that the objective pulls to."""
    if e.anchor is None:
        return []
    expected, recorded = e.anchor.expected, e.anchor.recorded
    residual, top_residual = e.anchor.residuals[recorded], e.anchor.top_residual
    measured = (
        f"recorded log-probs fit {recorded} (mean residual {residual:.1g}, for the most likely "
        f"tokens {top_residual:.1g}); the policy is trained at {expected}"
    )
    if not e.sampling.is_tested:
        return [Finding("anchor", measured, Status.UNKNOWN)]
    fits = max(residual, top_residual) <= _noise(e, recorded)
    if fits and recorded == expected:
        return [Finding("anchor", measured, Status.GOOD)]
    what = (
        f"The log-probs recorded for the anchor are those of {recorded}"
        if fits
        else f"The log-probs recorded for the anchor fit nothing that was tried (mean residual "
        f"{residual:.2g}, for the most likely tokens {top_residual:.2g})"
    )
    return [
        Finding(
            "anchor",
            measured,
            Status.FAULT,
            "anchor",
            e.anchor.mismatch,
            f"{what}, and not those of the policy at {expected}: the objective's KL is not 0 "
            "before anything is learned, and pulls the policy away with every step (1-ESS = "
            f"{e.anchor.mismatch.one_minus_ess:.2g} between the two). Have the engine record "
            f"softmax(logits / {expected.temperature:g}) before temperature and truncation, or set "
            'objective.anchor = "sampler" ("proximal" with pact) to pull to the sampler.',
        )
    ]


def check_micro_batch(e: Measurements) -> Finding:
    """Check that the trainer's log-probs do not depend on how sequences are packed."""
    layouts = e.arithmetic.layouts
    measured = "; ".join(
        f"{name}: mean |l| = {found.mean_abs:.1g}, max {found.max_abs:.1g}"
        for name, found in layouts.items()
    )
    worst = max(layouts, key=lambda name: layouts[name].mean_abs)
    if layouts[worst].mean_abs <= e.arithmetic.allowed:
        return Finding("micro-batch", measured, Status.GOOD)
    return Finding(
        "micro-batch",
        measured,
        Status.FAULT,
        "micro_batch",
        layouts[worst],
        f"The trainer disagrees with itself: with {worst} the same tokens have other log-probs, by "
        f"{layouts[worst].mean_abs:.2g} on average. Its ratios depend on how sequences are packed: "
        "set training.share_prompts = false if that setting is at fault, or look for layers of the "
        "model that attend to padding or to other rows.",
    )


def _is_not_renormalized(e: Measurements) -> bool:
    """Whether recorded log-probs are not renormalized over the truncated support."""
    sampled, recorded = e.sampling.sampled, e.sampling.recorded
    return (
        e.sampling.is_tested
        and e.logprob_mode != "raw"
        and not sampled.is_full
        and recorded == sampled.untruncated
    )


def second_policies(config: Config) -> list[Finding]:
    """Report other models in [[rollout.policies]], which are always off-policy."""
    policies = [p for p in config.rollout.policies if p.share > 0]
    if not policies:
        return []
    shares = ", ".join(f"{p.share:.0%} from {p.policy_name}" for p in policies)
    return [
        Finding(
            "other models",
            f"{shares}; not measured here",
            Status.CONFIGURED,
            "second_policies",
            None,
            f"Of the completions, {shares}: off-policy by rollout.policies, by as much as those "
            "models differ; a run measures it as policy/NAME/one_minus_ess.",
        )
    ]
