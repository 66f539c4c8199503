"""What a configuration may ask for, and what nevertheless works against it."""

from trustbatch.config.objective import TRUNCATED_DEFAULT
from trustbatch.config.tree import Config


def cautions(config: Config) -> list[str]:
    """Return a sentence for each such thing, with what to change; shown before anything is sampled.

    Not errors: a study may want to see what happens.
    """
    return _clipped_temperature(config) + _truncated_support(config)


def _truncated_support(config: Config) -> list[str]:
    """Rollouts without a tail, and an objective to which the tail is nothing."""
    rollout = config.rollout
    keys = {"top_p": rollout.top_p < 1.0, "top_k": rollout.top_k > 0}
    if config.objective.build().sees_support or not any(keys.values()):
        return []
    named = " and ".join(f"rollout.{key} = {getattr(rollout, key):g}" for key in keys if keys[key])
    return [
        f"{named} never samples the tail, so {config.objective.name} does not notice what mass the "
        "policy moves there, which has ruined runs; sample without it, or set objective.name = "
        f'"{TRUNCATED_DEFAULT}".'
    ]


def _clipped_temperature(config: Config) -> list[str]:
    """A clip of the ratio to the behavior policy, where another temperature alone moves it."""
    sampled, policy = config.rollout.temperature, config.policy_temperature
    # raw log-probs are those at T = 1, and the ratio is to what was recorded
    recorded = 1.0 if config.rollout.logprob_mode == "raw" else sampled
    clipped = config.objective.build().clips_behavior_ratio
    # a bound on the difference of probabilities leaves unlikely tokens alone, whatever their ratio
    if recorded == policy or clipped in (None, "probability"):
        return []
    is_raw = recorded != sampled
    mode = ' with rollout.logprob_mode = "raw"' if is_raw else ""
    cure = 'rollout.logprob_mode to "processed", and ' if is_raw else ""
    if clipped == "sequence":
        effect = _on_sequences(is_raw=is_raw)
    else:
        effect = _on_tokens(recorded > policy, has_range=clipped == "token")
    return [
        f"rollout.temperature = {sampled:g}{mode} and a policy temperature of {policy:g} move the "
        f"ratio r that {config.objective.name} clips: {effect}; set {cure}rollout.temperature and "
        "training.policy_temperature to the same number, or choose an objective without such a "
        "clip, such as p3o."
    ]


def _on_tokens(is_hotter: bool, *, has_range: bool) -> str:
    """With the policy p at temperature 1 and tokens recorded at T, r = p^(1 - 1/T) Z.

    At T > 1 it is below 1 for unlikely tokens and above 1 for likely ones, whatever the rewards.
    """
    wrong, right = ("unlikely", "likely") if is_hotter else ("likely", "unlikely")
    low, high = ("1 - clip_low", "1 + clip_high") if has_range else ("1", "1")
    return (
        f"what is wrong and {wrong} (A < 0, r < {low}) or right and {right} (A > 0, "
        f"r > {high}) is silenced, so entropy {'rises' if is_hotter else 'falls'} by itself"
    )


def _on_sequences(*, is_raw: bool) -> str:
    """The mean of log r over tokens of b is -KL(b || p): below 0 at any other temperature.

    Not so where the tokens are of another distribution than the one that was recorded.
    """
    if is_raw:
        return "most of what is wrong, or most of what is right, is silenced"
    return (
        "its log is minus a KL on average, so most of what is wrong (A < 0, r < 1 - clip_low) is "
        "silenced, and little but what is right is learned from"
    )
