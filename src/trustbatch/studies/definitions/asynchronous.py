"""What if generation runs one or two steps ahead of training?"""

from trustbatch.studies.methods import P3O, crossed_arms, grpo
from trustbatch.studies.regimes import lag
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study


def asynchronous(scale: Scale) -> Study:
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
