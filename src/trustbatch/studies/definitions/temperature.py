"""What if rollouts are sampled at another temperature than the policy's?"""

from trustbatch.studies.methods import P3O, crossed_arms, grpo
from trustbatch.studies.regimes import temperature as at
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study


def temperature(scale: Scale) -> Study:
    """Rollouts at T = 0.6 and at T = 1.2, while the policy is optimized at 1."""
    return Study(
        name="temperature",
        scale=scale.name,
        title="Temperature of rollouts",
        question="Which objective holds when rollouts are sampled at another temperature?",
        base=scale.base_of("temperature"),
        arms=crossed_arms([at(0.6), at(1.2)], [P3O, grpo(0.4)]),
        seeds=scale.seeds,
        paper_columns={"p3o": "p3o", "grpo": "grpo-0.4"},
    )
