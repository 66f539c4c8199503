"""What the settings of a TRL trainer mean for an objective, and which are refused."""

import logging
from dataclasses import fields, replace
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.objectives import Objective

logger = logging.getLogger(__name__)

LOSS_SETTINGS = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_k_neg",
    "vespo_lambda_pos",
    "vespo_lambda_neg",
    "use_bias_correction_kl",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "use_adaptive_entropy",
)
"""of TRL's own losses; an objective has options of its own instead"""
COEFFICIENTS = {"beta": "reference_kl_coef", "entropy_coef": "entropy_coef"}
"""settings of TRL that every objective has too, by its name for them"""


def fitted(objective: Objective, args: Any) -> Objective:
    """Return the objective with TRL's coefficients; refuses settings that it would ignore."""
    _refuse_loss_settings(args)
    objective = objective.resolved(has_top_logp=False)
    if objective.needs_top_logp:
        raise ConfigError(
            'kl = "top_k" needs the most likely tokens of each position, which TRL does not '
            'record: set kl to "importance".'
        )
    for theirs, ours in COEFFICIENTS.items():
        wanted, given = getattr(args, theirs, 0.0), getattr(objective, ours)
        if given not in (0.0, wanted):
            instead = f"set {theirs} in its configuration" if hasattr(args, theirs) else "remove it"
            raise ConfigError(f"{ours} = {given} of the objective has no effect in TRL: {instead}.")
        try:
            objective = replace(objective, **{ours: wanted})
        except ValueError as error:
            raise ConfigError(f"{theirs} = {wanted} can't be used: {error}") from error
    return objective


def _refuse_loss_settings(args: Any) -> None:
    defaults = {field.name: field.default for field in fields(args)}
    for name in LOSS_SETTINGS:
        if name in defaults and getattr(args, name) != defaults[name]:
            raise ConfigError(
                f"{name} = {getattr(args, name)!r} is a setting of TRL's own losses, which an "
                "objective replaces: remove it, and set the objective's options instead, as in "
                'objective={"name": "grpo", "clip_high": 0.28}.'
            )


def truncates(args: Any) -> bool:
    """Whether tokens are sampled from less than the policy at its temperature."""
    return args.top_p < 1.0 or args.top_k > 0 or bool(args.min_p) or args.repetition_penalty != 1.0


def warn_of_unrecorded_truncation(trainer: Any) -> None:
    """Say so where tokens come from a distribution whose log-probs nobody records."""
    if truncates(trainer.args) and not trainer.use_vllm and trainer.rollout_func is None:
        logger.warning(
            "top_p, top_k, min_p or repetition_penalty change the distribution that tokens are "
            "sampled from, and TRL records its log-probs with vLLM only: ratios are to the policy "
            "without them. Leave them at their defaults, or set use_vllm=True."
        )
