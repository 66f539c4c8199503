# pyright: reportMissingImports=false
# (types are checked without verl, which is optional and large)
"""The objectives as policy losses of verl: `actor.policy_loss.loss_mode=trustbatch_p3o`.

verl imports this module by the entry point `verl.plugins` of trustbatch, in each of its processes,
and calls nothing in it: the last lines register the losses.

A policy loss of verl sees one micro-batch. What an objective needs of the whole optimizer step is
measured around `BaseEngine.train_batch`, which all of verl's training engines share: an inference
pass if the objective's totals depend on the policy, and a sum over the data-parallel ranks.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig

from trustbatch.errors import ConfigError
from trustbatch.integrations.step_totals import padded_tokens
from trustbatch.objectives import OBJECTIVES, Objective, TokenBatch, Totals
from trustbatch.objectives.metrics import Metrics, average_over_steps, merge_metrics
from trustbatch.utils.distributed import all_gather
from trustbatch.utils.options import find_entry

PREFIX = "trustbatch_"
FIELDS = ("response_mask", "rollout_log_probs", "old_log_probs", "advantages")
"""of verl's batches, each [sequences, response tokens]"""

_REGISTERED: dict[str, Objective] = {}


@dataclass
class _Step:
    """What the losses of all micro-batches of an optimizer step share on this rank."""

    objective: Objective
    totals: Totals | None = None
    """of the whole step; None while they are measured"""
    behavior_logp: Tensor | None = None
    """[sequences, response tokens] of the current micro-batch"""
    parts: list[Totals] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)


_STEP: ContextVar[_Step | None] = ContextVar("step", default=None)


def register_objective(name: str, objective: Objective) -> None:
    """Make an objective a policy loss of verl: `loss_mode=NAME` then trains with it.

    For other options than the defaults, call it in a module of your own that verl imports:
    `VERL_USE_EXTERNAL_MODULES=my_losses`.
    """
    if type(objective).learning_rate_factor is not Objective.learning_rate_factor:
        raise ConfigError(
            f"{name} scales the learning rate of each step, which verl's losses can't: choose "
            "another objective."
        )
    if objective.entropy_coef or objective.reference_kl_coef:
        raise ConfigError(
            f"{name} must leave entropy_coef and reference_kl_coef at 0: set verl's own "
            "actor.entropy_coeff, or actor.use_kl_loss and actor.kl_loss_coef."
        )
    if objective.needs_top_logp:
        raise ConfigError(
            f"{name} needs the K most likely tokens, which verl does not record: set "
            'kl="importance".'
        )
    _REGISTERED[name] = objective
    register_policy_loss(name)(functools.partial(_policy_loss, name))


def _policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return this micro-batch's loss; while a step is measured, add to its totals instead."""
    step = _STEP.get()
    if step is None or step.behavior_logp is None:
        raise ConfigError(
            f"{name} needs sums over the whole optimizer step, which are measured around verl's "
            "BaseEngine.train_batch: train with ActorRolloutRefWorker, whose configuration names "
            "the loss."
        )
    if rollout_is_weights is not None:
        raise ConfigError(
            f"{name} corrects for the rollout's policy itself: set "
            "algorithm.rollout_correction.rollout_is=null."
        )
    tokens = _tokens(
        step.objective, log_prob, old_log_prob, step.behavior_logp, advantages, response_mask
    )
    if step.totals is None:
        step.parts.append(step.objective.totals(tokens))
        return log_prob.new_zeros(()), {}
    output = step.objective(tokens, step.totals.to(log_prob.device))
    step.metrics.append(output.metrics)
    # losses of micro-batches are added, and gradients averaged over the data-parallel ranks
    return output.loss * config.global_batch_info["dp_size"], {}


def _tokens(
    objective: Objective,
    log_prob: Tensor,
    old_log_prob: Tensor,
    behavior_logp: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> TokenBatch:
    return padded_tokens(
        logp=log_prob.float(),
        behavior_logp=behavior_logp.float(),
        advantage=advantages.float(),
        mask=response_mask,
        proximal_logp=old_log_prob.float() if objective.needs_proximal else None,
    )


def _train_batch(original: Callable[..., Any], engine: Any, data: Any, loss_function: Any) -> Any:
    """Take verl's optimizer step; for one of our losses, between measuring and reporting it."""
    name = _loss_mode(getattr(loss_function, "keywords", {}).get("config"))
    if name not in _REGISTERED:
        return original(engine, data, loss_function)
    step = _Step(_REGISTERED[name])
    batch = _checked(name, step.objective, data)
    loss_function = functools.partial(_with_behavior_logp, step, loss_function)
    with _current(step):
        if step.objective.totals_need_policy:
            engine.infer_batch(data, loss_function=loss_function)
        else:
            behavior_logp = batch["rollout_log_probs"]
            tokens = _tokens(
                step.objective,
                behavior_logp,
                batch["old_log_probs"],
                behavior_logp,
                batch["advantages"],
                batch["response_mask"],
            )
            step.parts.append(step.objective.totals(tokens))
        # a rank of an earlier pipeline stage has no losses, nor has any of its data-parallel group
        parts = [part for rank in _over_ranks(engine, step.parts) for part in rank]
        step.totals = functools.reduce(operator.add, parts) if parts else None
        outputs = original(engine, data, loss_function)
    metrics = _over_ranks(engine, merge_metrics(step.metrics))
    if engine.is_mp_src_rank_with_outputs():
        for key, value in average_over_steps([merge_metrics(metrics)]).items():
            # the same on all ranks, so that their mean is the value
            outputs["metrics"][f"trustbatch/{key}"] = Metric(AggregationType.MEAN, value)
    return outputs


def _with_behavior_logp(step: _Step, loss_function: Any, **given: Any) -> Any:
    """Call verl's loss, which does not pass the rollout's log-probs on to the policy loss."""
    padded = given["data"].select("rollout_log_probs").to_padded_tensor()
    step.behavior_logp = padded["rollout_log_probs"]
    return loss_function(**given)


def _checked(name: str, objective: Objective, data: Any) -> Any:
    """Return the padded fields of a mini-batch; refuse one without the rollout's log-probs."""
    if "rollout_log_probs" not in data:
        raise ConfigError(
            f"{name} needs the log-probs of the rollout: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    batch = data.select(*FIELDS).to_padded_tensor()
    if objective.needs_proximal and torch.equal(batch["old_log_probs"], batch["rollout_log_probs"]):
        raise ConfigError(
            f"{name} needs the log-probs of the policy before the update, and not only those of "
            "the rollout: set algorithm.rollout_correction.bypass_mode=false."
        )
    return batch


def _over_ranks(engine: Any, value: Any) -> list[Any]:
    """Return the values of all data-parallel ranks; an engine without such a group has one rank."""
    group = engine.get_data_parallel_group()
    return [value] if group is None else all_gather(value, group=group)


@contextmanager
def _current(step: _Step) -> Iterator[None]:
    previous = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(previous)


def _loss_mode(config: Any) -> str:
    policy_loss = getattr(config, "policy_loss", None)
    return "" if policy_loss is None else policy_loss.get("loss_mode", "")


def _check_actor(original: Callable[..., None], config: Any) -> None:
    """Check the settings of an actor; if it has one of our losses, have its steps measured.

    The engines are wrapped here, not when verl is imported: rollout servers import verl too, and
    must not load engines that they never use.
    """
    original(config)
    name = _loss_mode(config)
    if not name.startswith(PREFIX) and name not in _REGISTERED:
        return
    try:
        find_entry(_REGISTERED, name, kind="policy loss")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.loss_agg_mode != "token-mean":
        raise ConfigError(
            f"{name} is an average by its own definition: leave "
            "actor_rollout_ref.actor.loss_agg_mode at token-mean."
        )
    from verl.workers.engine import BaseEngine

    _wrap(BaseEngine, "train_batch", _train_batch)


def _wrap(owner: type, method: str, around: Callable[..., Any]) -> None:
    """Replace a method of verl by `around(original, self, ...)`, once."""
    original = getattr(owner, method)
    if getattr(original, "wrapped_by_trustbatch", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    wrapped.wrapped_by_trustbatch = True  # type: ignore[attr-defined]
    setattr(owner, method, wrapped)


def _register_all() -> None:
    for name, kind in OBJECTIVES.items():
        if kind.learning_rate_factor is Objective.learning_rate_factor:
            register_objective(f"{PREFIX}{name}", kind())
    _wrap(ActorConfig, "__post_init__", _check_actor)


_register_all()
