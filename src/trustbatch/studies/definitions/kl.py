"""How should P3O measure its KL? Beyond the paper."""

from trustbatch.studies.methods import Method, crossed_arms
from trustbatch.studies.regimes import off_policy_regimes
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study

LABELS = {
    "top_k": "KL over the top tokens",
    "importance": "importance-weighted KL",
    "k3": "k3",
    "none": "no KL",
}


def kl(scale: Scale) -> Study:
    """P3O with each estimate of the KL and without one, in every off-policy regime."""
    methods = [
        Method(
            name="no-kl" if choice == "none" else choice.replace("_", "-"),
            label=label,
            changes={"objective.name": "p3o", "objective.kl": choice},
        )
        for choice, label in LABELS.items()
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
