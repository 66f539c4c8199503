"""What a configuration may ask for, and what nevertheless works against it."""

from trustbatch.config import Config


def cautions(config: Config) -> list[str]:
    """Return a sentence for each such thing, with what to change; shown before anything is drawn.

    Not errors: a study may want to see what happens.
    """
    return _clipped_temperature(config)


def _clipped_temperature(config: Config) -> list[str]:
    """A clip of the ratio to the behaviour policy, where another temperature alone moves it.

    With the policy p at temperature 1 and tokens drawn at T, r = p^(1 - 1/T) Z: at T > 1 below 1
    for unlikely tokens and above 1 for likely ones. A clip then never lowers the unlikely and never
    raises the likely, whatever the rewards are.
    """
    drawn, policy = config.rollout.temperature, config.policy_temperature
    # raw log-probs are those at T = 1, and the ratio is to what was recorded
    recorded = 1.0 if config.rollout.logprob_mode == "raw" else drawn
    if recorded == policy or not config.build_objective().clips_behaviour_ratio:
        return []
    above = recorded > policy
    wrong, right = ("unlikely", "likely") if above else ("likely", "unlikely")
    raw, mode = "", ""
    if recorded != drawn:
        raw, mode = (
            ' with rollout.logprob_mode = "raw"',
            'rollout.logprob_mode to "processed", and ',
        )
    return [
        f"rollout.temperature = {drawn:g}{raw} and a policy temperature of {policy:g} move the "
        f"ratio r that {config.objective.name} clips: what is wrong and {wrong} (A < 0, "
        f"r < 1 - clip_low) or right and {right} (A > 0, r > 1 + clip_high) is silenced, so "
        f"entropy {'rises' if above else 'falls'} by itself; set {mode}rollout.temperature and "
        "training.policy_temperature to the same number, or choose an objective without such a "
        "clip, such as p3o."
    ]
