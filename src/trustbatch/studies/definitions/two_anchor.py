"""Is the two-anchor extension of P3O stable?"""

from trustbatch.studies.methods import P3O, TWO_ANCHOR, crossed_arms, grpo
from trustbatch.studies.regimes import temperature as at
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study


def two_anchor(scale: Scale) -> Study:
    """Two-anchor beside P3O and GRPO at T = 1.2, and at T = 1.0 with GRPO's clip at 0.4."""
    return Study(
        name="two_anchor",
        scale=scale.name,
        title="Two anchors",
        question="Is the two-anchor extension better than P3O, and is it stable?",
        base=scale.base_of("two_anchor"),
        arms=(
            *crossed_arms([at(1.2)], [TWO_ANCHOR, P3O, grpo(0.2)]),
            *crossed_arms([at(1.0)], [TWO_ANCHOR, P3O, grpo(0.4)]),
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
