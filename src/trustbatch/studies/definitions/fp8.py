"""What if rollouts come from a policy that is rounded to 8 bits?"""

from trustbatch.studies.methods import P3O, crossed_arms, grpo
from trustbatch.studies.regimes import fp8 as in_fp8
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study


def fp8(scale: Scale) -> Study:
    """FP8 rollouts for a policy that is trained in the usual precision."""
    return Study(
        name="fp8",
        scale=scale.name,
        title="FP8 rollouts",
        question="Which objective holds when rollouts are sampled in FP8?",
        base=scale.base_of("fp8"),
        arms=crossed_arms([in_fp8()], [P3O, grpo(0.4)]),
        seeds=scale.seeds,
        paper_columns={"p3o": "p3o", "grpo": "grpo-0.4"},
    )
