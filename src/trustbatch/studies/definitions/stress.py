"""How far can rollouts be from the policy before an objective fails? Beyond the paper."""

from trustbatch.studies.methods import (
    CISPO,
    DAPO,
    DECOUPLED,
    DPPO,
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
    crossed_arms,
    objective,
)
from trustbatch.studies.regimes import all_regimes
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study

GRPO = objective("grpo", label="GRPO")


def stress(scale: Scale) -> Study:
    """Every objective with its own defaults in every regime; nothing is tuned for any of them."""
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
