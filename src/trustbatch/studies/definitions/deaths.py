"""Does a scale tell what dies? The regimes in which a real model has died or lived."""

from trustbatch.studies.methods import CISPO, P3O_SAMPLER, crossed_arms, grpo, variant
from trustbatch.studies.regimes import fresh, hot_and_old, lag, temperature, top_p
from trustbatch.studies.scales.scale import Scale
from trustbatch.studies.study import Study

TO_MODEL = variant("p3o-model", "P3O pulled to the model", name="p3o", anchor="model")
WITHOUT_KL = variant("p3o-no-kl", "P3O without KL", name="p3o", kl="none")


def deaths(scale: Scale) -> Study:
    """P3O with each anchor and without KL, GRPO and CISPO, where they have died on a real model."""
    methods = [TO_MODEL, WITHOUT_KL, grpo(0.2), CISPO]
    reshaped = [temperature(1.2), temperature(0.6), top_p(0.95), hot_and_old(scale, 1.2, 4)]
    return Study(
        name="deaths",
        scale=scale.name,
        title="Deaths",
        question="Does what dies on a real model die here, and does what lives there live?",
        base=scale.base_of("deaths"),
        arms=(
            # the sampler is the model there
            *crossed_arms([fresh(), lag(scale, 8)], methods),
            *crossed_arms(reshaped, [*methods, P3O_SAMPLER]),
        ),
        seeds=scale.seeds,
        subject="p3o-model",
    )
