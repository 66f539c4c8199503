"""How strong should the pull be, and to what? Measured rules beside constants. Beyond the paper."""

from trustbatch.studies.methods import CISPO, DECOUPLED, P3O, crossed_arms, grpo, variant
from trustbatch.studies.regimes import fresh, hot_and_old, lag, temperature, top_p
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study

CANDIDATES = (
    variant("prox", "measured, to the proximal policy", name="pact", anchor="proximal"),
    variant("model", "measured, to the model", name="pact", anchor="model"),
    variant("both", "measured, to both", name="pact", anchor="both"),
)
SECOND_ROUND = (
    variant(
        "prox-rms",
        "rms(A), to the proximal policy",
        name="pact",
        anchor="proximal",
        pull="deviation",
    ),
    variant("both-rms", "rms(A), to both", name="pact", anchor="both", pull="deviation"),
)
CONTROLS = (
    variant("prox-0.3", "0.3, to the proximal policy", name="pact", anchor="proximal", pull=0.3),
    variant("prox-1", "1, to the proximal policy", name="pact", anchor="proximal", pull=1.0),
    variant("both-0.3", "0.3, to both", name="pact", anchor="both", pull=0.3),
    variant("both-1", "1, to both", name="pact", anchor="both", pull=1.0),
    variant("model-0.3", "0.3, to the model", name="pact", anchor="model", pull=0.3),
    variant("model-1", "1, to the model", name="pact", anchor="model", pull=1.0),
)


def trust(scale: Scale) -> Study:
    """Candidates for the measure of trust, constants as controls, and what users run today."""
    regimes = [
        fresh(),
        temperature(1.2),
        temperature(0.6),
        top_p(0.95),
        lag(scale, 8),
        hot_and_old(scale, 1.2, 4),
    ]
    methods = [*CANDIDATES, *SECOND_ROUND, *CONTROLS, P3O, grpo(0.2), CISPO, DECOUPLED]
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
