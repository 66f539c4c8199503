"""The objectives as a study compares them: each by its own defaults, or with a clip range."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustbatch.studies.study import Arm


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, whatever the rollouts are."""

    name: str
    label: str
    changes: Mapping[str, Any]
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A way in which rollouts are off-policy, whatever is trained with them."""

    name: str
    label: str
    changes: Mapping[str, Any]


def objective(name: str, *, label: str) -> Method:
    """Return an objective with its own defaults."""
    return Method(name=name.replace("_", "-"), label=label, changes={"objective.name": name})


P3O = objective("p3o", label="P3O")
PACT = objective("pact", label="PACT")
TWO_ANCHOR = objective("two_anchor", label="Two-anchor")
DAPO = objective("dapo", label="DAPO")
GSPO = objective("gspo", label="GSPO")
CISPO = objective("cispo", label="CISPO")
DECOUPLED = objective("decoupled", label="Decoupled")
DPPO = objective("dppo", label="DPPO")
M2PO = objective("m2po", label="M2PO")
VESPO = objective("vespo", label="VESPO")
VCPO = objective("vcpo", label="VCPO")


def variant(arm: str, label: str, **options: str | float) -> Method:
    """Return an objective, by `name`, with some of its options set."""
    return Method(
        name=arm, label=label, changes={f"objective.{key}": value for key, value in options.items()}
    )


P3O_SAMPLER = variant("p3o-sampler", "P3O pulled to the sampler", name="p3o", anchor="sampler")
"""as in the paper"""


def grpo(clip: float) -> Method:
    """Return GRPO with a symmetric clip range; all of them are one family."""
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


TOKEN_TIS = variant("token-tis", "Token TIS", name="grpo_is", correction="token_truncate")
SEQUENCE_MIS = variant("sequence-mis", "Sequence MIS", name="grpo_is", correction="sequence_mask")


def single_arms(methods: Sequence[Method]) -> tuple[Arm, ...]:
    """Return an arm of each method, all on the same rollouts."""
    return tuple(
        Arm(name=each.name, label=each.label, changes=each.changes, family=each.family)
        for each in methods
    )


def crossed_arms(regimes: Sequence[Regime], methods: Sequence[Method]) -> tuple[Arm, ...]:
    """Return an arm of each method in each regime."""
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
