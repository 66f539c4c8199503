"""What if another model samples half of the rollouts?"""

from trustbatch.studies.methods import P3O, crossed_arms, grpo
from trustbatch.studies.regimes import mixed
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study


def mixing(scale: Scale) -> Study:
    """Half of each prompt's samples come from a model that is never trained."""
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
