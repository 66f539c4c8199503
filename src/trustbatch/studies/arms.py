"""Methods and off-policy regimes, and the arms that combine them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustbatch.studies.study import Arm, Scale


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, independent of how rollouts are generated."""

    name: str
    label: str
    changes: Mapping[str, Any]
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A way in which rollouts are off-policy, independent of the objective."""

    name: str
    label: str
    changes: Mapping[str, Any]


def single_arms(methods: Sequence[Method]) -> tuple[Arm, ...]:
    """Return an arm per method, without a regime."""
    return tuple(
        Arm(name=each.name, label=each.label, changes=each.changes, family=each.family)
        for each in methods
    )


def crossed_arms(regimes: Sequence[Regime], methods: Sequence[Method]) -> tuple[Arm, ...]:
    """Return an arm for each method in each regime."""
    return tuple(
        Arm(
            name=f"{regime.name}-{method.name}",
            label=f"{method.label}, {regime.label}",
            changes={**regime.changes, **method.changes},
            regime=regime.name,
            family=method.family,
        )
        for regime in regimes
        for method in methods
    )


def objective(name: str, *, label: str) -> Method:
    """Return an objective with its defaults."""
    return Method(name=name.replace("_", "-"), label=label, changes={"objective.name": name})


def variant(arm: str, label: str, **options: str | float) -> Method:
    """Return an objective, by `name`, with some of its options set."""
    return Method(
        name=arm, label=label, changes={f"objective.{key}": value for key, value in options.items()}
    )


def grpo(clip: float) -> Method:
    """Return GRPO with a symmetric clip range; all clip ranges form one family."""
    return Method(
        name=f"grpo-{clip:g}",
        label=f"GRPO, clip {clip:g}",
        changes={
            "objective.name": "grpo",
            "objective.clip_low": clip,
            "objective.clip_high": clip,
        },
        family="grpo",
    )


P3O = objective("p3o", label="P3O")
PACT = objective("pact", label="PACT")
TWO_ANCHOR = objective("two_anchor", label="Two-anchor")
GRPO = objective("grpo", label="GRPO")
DAPO = objective("dapo", label="DAPO")
GSPO = objective("gspo", label="GSPO")
CISPO = objective("cispo", label="CISPO")
DECOUPLED = objective("decoupled", label="Decoupled")
DPPO = objective("dppo", label="DPPO")
M2PO = objective("m2po", label="M2PO")
VESPO = objective("vespo", label="VESPO")
VCPO = objective("vcpo", label="VCPO")
P3O_SAMPLER = variant("p3o-sampler", "P3O pulled to the sampler", name="p3o", anchor="sampler")
"""as in the paper"""
TOKEN_TIS = variant("token-tis", "Token TIS", name="grpo_is", correction="token_truncate")
SEQUENCE_MIS = variant("sequence-mis", "Sequence MIS", name="grpo_is", correction="sequence_mask")


def fresh() -> Regime:
    """Rollouts of the current policy: off-policy only within a step."""
    return Regime(name="fresh", label="on-policy rollouts", changes={})


def lag(scale: Scale, versions: int) -> Regime:
    """Rollouts of a policy that is `versions` versions old."""
    return Regime(name=f"lag{versions}", label=f"lag {versions}", changes={scale.lag_key: versions})


def temperature(value: float) -> Regime:
    """Rollouts at another temperature than the policy's, which stays 1."""
    return Regime(
        name=f"t{value:.1f}", label=f"T = {value:.1f}", changes={"rollout.temperature": value}
    )


def top_p(value: float) -> Regime:
    """Rollouts without the least likely tokens, to which the policy still gives probability."""
    return Regime(
        name=f"top-p{value:g}", label=f"top-p {value:g}", changes={"rollout.top_p": value}
    )


def hot_and_old(scale: Scale, value: float, versions: int) -> Regime:
    """Rollouts of an older policy at another temperature."""
    hot, old = temperature(value), lag(scale, versions)
    return Regime(
        name=f"{hot.name}-{old.name}",
        label=f"{hot.label}, {old.label}",
        changes={**hot.changes, **old.changes},
    )


def fp8() -> Regime:
    """Rollouts of a policy rounded to 8 bits."""
    return Regime(name="fp8", label="FP8 rollouts", changes={"rollout.precision": "fp8"})


def fp8_kv() -> Regime:
    """Rollouts with keys and values in 8 bits."""
    return Regime(
        name="fp8-kv", label="FP8 keys and values", changes={"rollout.kv_precision": "fp8"}
    )


def mixed(scale: Scale, share: float) -> Regime:
    """A share of the rollouts from another model."""
    other = {"name": "other", "model": scale.other_model, "share": share}
    return Regime(
        name=f"mixed{share * 100:.0f}",
        label=f"{share:.0%} of rollouts from another model",
        changes={"rollout.policies": [other]},
    )


def all_regimes(scale: Scale) -> tuple[Regime, ...]:
    """Return every regime of the stress test."""
    return (fresh(), *off_policy_regimes(scale))


def off_policy_regimes(scale: Scale) -> tuple[Regime, ...]:
    """Return the regimes of the stress test that are off-policy by configuration."""
    # with fewer steps than the lag, all rollouts would come from the initial model
    lags = [versions for versions in (2, 8, 32) if versions < scale.base["training"]["steps"]]
    return (
        *(lag(scale, versions) for versions in lags),
        temperature(0.6),
        temperature(1.2),
        top_p(0.95),
        hot_and_old(scale, 1.2, 4),
        fp8(),
        mixed(scale, 0.25),
    )
