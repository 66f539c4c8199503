"""The studies: each is a function from a scale to what is compared there.

To add one, write such a function and add it to `DEFINITIONS`. The study `benchmarks`, which
evaluates what another study has trained, is in `benchmarks.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from trustbatch.studies.arms import (
    CISPO,
    DAPO,
    DECOUPLED,
    DPPO,
    GRPO,
    GSPO,
    M2PO,
    P3O,
    P3O_SAMPLER,
    PACT,
    SEQUENCE_MIS,
    TOKEN_TIS,
    TWO_ANCHOR,
    VCPO,
    VESPO,
    Method,
    all_regimes,
    crossed_arms,
    fp8,
    fp8_kv,
    fresh,
    grpo,
    hot_and_old,
    lag,
    mixed,
    off_policy_regimes,
    single_arms,
    temperature,
    top_p,
    variant,
)
from trustbatch.studies.study import Scale, Study

LAG_STEPS, STEPS = 3, 2
"""in the study `evidence`, steps of runs that lag and of the others, in this ratio"""


def clip_study(scale: Scale) -> Study:
    """GRPO with three clip ranges beside one P3O run; DAPO and GSPO with their own ranges."""
    return Study(
        name="clip",
        scale=scale.name,
        title="Clip range",
        question="Does P3O, which has no clip range, reach what GRPO reaches over three of them?",
        base=scale.base_of("clip"),
        arms=single_arms([P3O, grpo(0.2), grpo(0.4), grpo(0.6), DAPO, GSPO]),
        seeds=scale.seeds,
        paper_columns={"p3o": "p3o", "grpo_mean": "grpo:mean", "grpo_std": "grpo:std"},
    )


def temperature_study(scale: Scale) -> Study:
    """Rollouts at T = 0.6 and at T = 1.2, while the policy is optimized at 1."""
    return Study(
        name="temperature",
        scale=scale.name,
        title="Temperature of rollouts",
        question="Which objective holds when rollouts are sampled at another temperature?",
        base=scale.base_of("temperature"),
        arms=crossed_arms([temperature(0.6), temperature(1.2)], [P3O, grpo(0.4)]),
        seeds=scale.seeds,
        paper_columns={"p3o": "p3o", "grpo": "grpo-0.4"},
    )


def fp8_study(scale: Scale) -> Study:
    """FP8 rollouts for a policy that is trained in the usual precision."""
    return Study(
        name="fp8",
        scale=scale.name,
        title="FP8 rollouts",
        question="Which objective holds when rollouts are sampled in FP8?",
        base=scale.base_of("fp8"),
        arms=crossed_arms([fp8()], [P3O, grpo(0.4)]),
        seeds=scale.seeds,
        paper_columns={"p3o": "p3o", "grpo": "grpo-0.4"},
    )


def async_study(scale: Scale) -> Study:
    """Pipelines of one and of two steps, with one optimizer step for each batch of rollouts."""
    return Study(
        name="async",
        scale=scale.name,
        title="Asynchronous training",
        question="Which objective holds when rollouts are one or two versions old?",
        base=scale.base_of("async"),
        arms=crossed_arms([lag(scale, 1), lag(scale, 2)], [P3O, grpo(0.4)]),
        seeds=scale.seeds,
        paper_columns={"p3o_async_m5": "p3o", "grpo_async_m5": "grpo-0.4"},
    )


def mixing_study(scale: Scale) -> Study:
    """Half of each prompt's completions come from a model that is never trained."""
    return Study(
        name="mixing",
        scale=scale.name,
        title="Mixed policies",
        question="Which objective holds when another model samples half of the rollouts?",
        base=scale.base_of("mixing"),
        arms=crossed_arms([mixed(scale, 0.5)], [P3O, grpo(0.4)]),
        seeds=scale.seeds,
        paper_columns={"p3o": "p3o", "grpo": "grpo-0.4"},
    )


def two_anchor_study(scale: Scale) -> Study:
    """Two-anchor beside P3O and GRPO at T = 1.2, and at T = 1.0 with GRPO's clip at 0.4."""
    return Study(
        name="two_anchor",
        scale=scale.name,
        title="Two anchors",
        question="Is the two-anchor extension better than P3O, and is it stable?",
        base=scale.base_of("two_anchor"),
        arms=(
            *crossed_arms([temperature(1.2)], [TWO_ANCHOR, P3O, grpo(0.2)]),
            *crossed_arms([temperature(1.0)], [TWO_ANCHOR, P3O, grpo(0.4)]),
        ),
        seeds=scale.seeds,
        subject="two-anchor",
        paper_columns={
            "p4o": "two-anchor",
            "p3o": "p3o",
            "grpo": "grpo-0.2",
            "grpo_clip04": "grpo-0.4",
        },
    )


KL_LABELS = {
    "top_k": "KL over the top tokens",
    "importance": "importance-weighted KL",
    "k3": "k3",
    "none": "no KL",
}


def kl_study(scale: Scale) -> Study:
    """P3O with each KL estimator and without one, in every off-policy regime."""
    methods = [
        Method(
            name="no-kl" if choice == "none" else choice.replace("_", "-"),
            label=label,
            changes={"objective.name": "p3o", "objective.kl": choice},
        )
        for choice, label in KL_LABELS.items()
    ]
    return Study(
        name="kl",
        scale=scale.name,
        title="The KL of P3O",
        question="Which estimate of the KL should P3O use by default, and does it need the KL?",
        base=scale.base_of("kl"),
        arms=crossed_arms(off_policy_regimes(scale), methods),
        seeds=scale.seeds,
        subject="top-k",
    )


def stress_study(scale: Scale) -> Study:
    """Every objective with its defaults in every regime; nothing is tuned for any of them."""
    methods = [PACT, P3O, P3O_SAMPLER, TWO_ANCHOR, GRPO, DAPO, GSPO, CISPO, DECOUPLED]
    methods += [TOKEN_TIS, SEQUENCE_MIS, DPPO, M2PO, VESPO, VCPO]
    return Study(
        name="stress",
        scale=scale.name,
        title="Stress",
        question="Which objectives hold in every off-policy regime with one configuration?",
        base=scale.base_of("stress"),
        arms=crossed_arms(all_regimes(scale), methods),
        seeds=scale.seeds,
    )


def evidence_study(scale: Scale) -> Study:
    """The campaign of docs/evidence.md: the objectives of today under ten kinds of rollouts."""
    steps = scale.base_of("evidence")["training"]["steps"]
    # a lag delays what can be learned
    longer = {"training.steps": LAG_STEPS * steps // STEPS}
    aged = [lag(scale, 2), lag(scale, 8), hot_and_old(scale, 1.2, 4)]
    aged = [replace(each, changes={**each.changes, **longer}) for each in aged]
    regimes = [
        *(fresh(), temperature(1.2), temperature(0.6), top_p(0.95)),
        *(*aged, fp8(), fp8_kv(), mixed(scale, 0.5)),
    ]
    methods = [PACT, GRPO, P3O, DECOUPLED, CISPO, P3O_SAMPLER, TWO_ANCHOR, DAPO, GSPO]
    methods += [SEQUENCE_MIS, DPPO, M2PO, VCPO, VESPO]
    return Study(
        name="evidence",
        scale=scale.name,
        title="Evidence",
        question="Which objectives learn, live or die when rollouts are not the policy's own?",
        base=scale.base_of("evidence"),
        # where time is short, whole rows are finished in the order of methods
        arms=tuple(arm for method in methods for arm in crossed_arms(regimes, [method])),
        seeds=(1, 2, 3),
        subject="pact",
    )


P3O_MODEL = variant("p3o-model", "P3O pulled to the model", name="p3o", anchor="model")
P3O_NO_KL = variant("p3o-no-kl", "P3O without KL", name="p3o", kl="none")


def deaths_study(scale: Scale) -> Study:
    """P3O with each anchor and without KL, GRPO and CISPO, where they collapsed on a real model."""
    methods = [P3O_MODEL, P3O_NO_KL, grpo(0.2), CISPO]
    reshaped = [temperature(1.2), temperature(0.6), top_p(0.95), hot_and_old(scale, 1.2, 4)]
    return Study(
        name="deaths",
        scale=scale.name,
        title="Deaths",
        question="Does what dies on a real model die here, and does what lives there live?",
        base=scale.base_of("deaths"),
        arms=(
            # here the sampler and the model have the same distribution
            *crossed_arms([fresh(), lag(scale, 8)], methods),
            *crossed_arms(reshaped, [*methods, P3O_SAMPLER]),
        ),
        seeds=scale.seeds,
        subject="p3o-model",
    )


TRUST_CANDIDATES = (
    variant("prox", "measured, to the proximal policy", name="pact", anchor="proximal"),
    variant("model", "measured, to the model", name="pact", anchor="model"),
    variant("both", "measured, to both", name="pact", anchor="both"),
    variant(
        "prox-rms",
        "rms(A), to the proximal policy",
        name="pact",
        anchor="proximal",
        pull="deviation",
    ),
    variant("both-rms", "rms(A), to both", name="pact", anchor="both", pull="deviation"),
)
CONSTANT_PULLS = (
    variant("prox-0.3", "0.3, to the proximal policy", name="pact", anchor="proximal", pull=0.3),
    variant("prox-1", "1, to the proximal policy", name="pact", anchor="proximal", pull=1.0),
    variant("both-0.3", "0.3, to both", name="pact", anchor="both", pull=0.3),
    variant("both-1", "1, to both", name="pact", anchor="both", pull=1.0),
    variant("model-0.3", "0.3, to the model", name="pact", anchor="model", pull=0.3),
    variant("model-1", "1, to the model", name="pact", anchor="model", pull=1.0),
)


def trust_study(scale: Scale) -> Study:
    """Candidates for the measure of trust, constants as controls, and common baselines."""
    regimes = [
        fresh(),
        temperature(1.2),
        temperature(0.6),
        top_p(0.95),
        lag(scale, 8),
        hot_and_old(scale, 1.2, 4),
    ]
    methods = [*TRUST_CANDIDATES, *CONSTANT_PULLS, P3O, grpo(0.2), CISPO, DECOUPLED]
    return Study(
        name="trust",
        scale=scale.name,
        title="Trust",
        question="Does a measured strength of the pull beat every constant?",
        base=scale.base_of("trust"),
        arms=crossed_arms(regimes, methods),
        seeds=scale.seeds,
        subject="both",
    )


DEFINITIONS: Mapping[str, Callable[[Scale], Study]] = {
    "clip": clip_study,
    "temperature": temperature_study,
    "fp8": fp8_study,
    "async": async_study,
    "mixing": mixing_study,
    "two_anchor": two_anchor_study,
    "kl": kl_study,
    "stress": stress_study,
    "deaths": deaths_study,
    "trust": trust_study,
    "evidence": evidence_study,
}
