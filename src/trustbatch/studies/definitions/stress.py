"""How far can rollouts be from the policy before an objective fails? Beyond the paper."""

from trustbatch.studies.methods import (
    CISPO,
    DAPO,
    DECOUPLED,
    GSPO,
    P3O,
    TWO_ANCHOR,
    crossed_arms,
    objective,
)
from trustbatch.studies.regimes import all_regimes
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study

GRPO = objective("grpo", label="GRPO")


def stress(scale: Scale) -> Study:
    """Every objective with its own defaults in every regime; nothing is tuned for any of them."""
    methods = [P3O, TWO_ANCHOR, GRPO, DAPO, GSPO, CISPO, DECOUPLED]
    return Study(
        name="stress",
        scale=scale.name,
        title="Stress",
        question="Which objectives hold in every off-policy regime with one configuration?",
        base=scale.base_of("stress"),
        arms=crossed_arms(all_regimes(scale), methods),
        seeds=scale.seeds,
    )
