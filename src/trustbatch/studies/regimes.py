"""How rollouts become off-policy, in the keys of a scale's configuration."""

from trustbatch.studies.methods import Regime
from trustbatch.studies.scales.scale import Scale


def fresh() -> Regime:
    """Rollouts of the policy as it is: off-policy only within a step."""
    return Regime(name="fresh", label="on-policy rollouts", changes={})


def lag(scale: Scale, versions: int) -> Regime:
    """Rollouts that are so many policy versions old."""
    return Regime(name=f"lag{versions}", label=f"lag {versions}", changes={scale.lag_key: versions})


def temperature(value: float) -> Regime:
    """Rollouts sampled at another temperature than the policy's, which stays 1."""
    return Regime(
        name=f"t{value:.1f}", label=f"T = {value:.1f}", changes={"rollout.temperature": value}
    )


def top_p(value: float) -> Regime:
    """Rollouts without the least likely tokens, which the policy still has."""
    return Regime(
        name=f"top-p{value:g}", label=f"top-p {value:g}", changes={"rollout.top_p": value}
    )


def hot_and_old(scale: Scale, value: float, versions: int) -> Regime:
    """Rollouts at another temperature that are old as well."""
    hot, old = temperature(value), lag(scale, versions)
    return Regime(
        name=f"{hot.name}-{old.name}",
        label=f"{hot.label}, {old.label}",
        changes={**hot.changes, **old.changes},
    )


def fp8() -> Regime:
    """Rollouts of a policy that is rounded to 8 bits."""
    return Regime(name="fp8", label="FP8 rollouts", changes={"rollout.precision": "fp8"})


def mixed(scale: Scale, share: float) -> Regime:
    """A share of the rollouts from another model."""
    other = {"name": "other", "model": scale.other_model, "share": share}
    return Regime(
        name=f"mixed{share * 100:.0f}",
        label=f"{share:.0%} of rollouts from another model",
        changes={"rollout.policies": [other]},
    )


def all_regimes(scale: Scale) -> tuple[Regime, ...]:
    """Return what an objective is stressed with."""
    return (fresh(), *off_policy_regimes(scale))


def off_policy_regimes(scale: Scale) -> tuple[Regime, ...]:
    """Return them without the first."""
    # with fewer steps than that, all rollouts would be those of the initial model
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
