"""Does the clip range matter, and is one needed?"""

from trustbatch.studies.methods import DAPO, GSPO, P3O, grpo, single_arms
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study


def clip(scale: Scale) -> Study:
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
