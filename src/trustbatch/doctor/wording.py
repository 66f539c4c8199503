"""The words in which the checks speak of settings: keys of a configuration, or a file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """What a sentence says of a setting, and what to change."""

    temperature_is: str
    """before the expected temperature"""
    support_is: str
    """after the expected truncation"""
    own_settings: str
    """where an engine uses other settings than the expected ones"""
    by_temperature: str
    """after a temperature that is as expected"""
    other_temperature: str
    """what to do about it"""
    by_support: str
    """after a truncation that is as expected"""
    no_truncation: str
    """how to turn it off"""


STACK = Wording(
    temperature_is="rollout.temperature is",
    support_is="is configured",
    own_settings="The engine applies its own sampling settings, such as those of the model's "
    "generation_config.json: remove them there.",
    by_temperature="by rollout.temperature",
    other_temperature='Set training.policy_temperature = "rollout" to train the tempered policy '
    "itself, or let P3O correct for it; a clip range would discard part of such a batch.",
    by_support="by configuration",
    no_truncation="set rollout.top_p = 1.0 and rollout.top_k = 0",
)


def file_wording(*, is_stated: bool) -> Wording:
    """Return the words for recorded rollouts, whose settings may be stated or not."""
    remedy = (
        "Either they are recorded wrongly, or the engine applies its own settings, such as those "
        "of the model's generation_config.json: remove them there, or record what is used."
        if is_stated
        else "Record the settings that are used, or give them as --temperature, --top-p and "
        "--top-k."
    )
    said = "stated" if is_stated else "assumed, as no settings are recorded"
    return Wording(
        temperature_is="the stated temperature is" if is_stated else "without a record it is",
        support_is=f"is {said}",
        own_settings=remedy,
        by_temperature="as stated",
        other_temperature="Train the policy at the temperature of the rollouts (divide its logits "
        "by it), or use an objective that corrects for it.",
        by_support="as stated",
        no_truncation="sample with top_p = 1 and without top_k",
    )
