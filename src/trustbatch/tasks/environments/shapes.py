"""The shapes of environments, told apart by their members.

Gymnasium and GEM: `reset(seed) -> (observation, info)` and
`step(action) -> (observation, reward, terminated, truncated, info)`.
Older Gym: `reset() -> observation` and `step(action) -> (observation, reward, done, info)`.
SkyRL Gym: `init(conversation) -> (conversation, metadata)` and
`step(action) -> {"observations": ..., "reward": ..., "done": ...}`.
OpenEnv: `reset(seed)` and `step(action)` return objects with `observation`, `reward` and `done`.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trustbatch.tasks.base import Reply, is_reply

RESULT = ("observation", "reward", "done")
STEP_SHAPES = (
    "(observation, reward, terminated, truncated, info), (observation, reward, done, info), "
    "{observations, reward, done}, or an object with observation, reward and done"
)


@dataclass(frozen=True, slots=True)
class Observed:
    """What an environment answers to a turn."""

    observation: Reply | None
    """None where the episode is over"""
    reward: float
    truncated: bool = False


def start(
    environment: Any, seed: int, conversation: Any, as_text: Callable[[Any], Any] | None
) -> Reply:
    """Start an episode, and return the first observation."""
    if hasattr(environment, "reset"):
        seeded = {"seed": seed} if _takes(environment.reset, "seed") else {}
        result = environment.reset(**seeded)
    elif hasattr(environment, "init"):
        result = environment.init(conversation)
    else:
        raise TypeError(
            f"{type(environment).__name__} has neither reset nor init: make the factory return an "
            "environment"
        )
    info: Any = {}
    if isinstance(result, tuple) and len(result) == 2:
        result, info = result
    elif hasattr(result, "observation"):
        (result,) = (getattr(result, name) for name in RESULT[:1])
    return _observation(result, info, as_text)


def step(environment: Any, action: Any, as_text: Callable[[Any], Any] | None) -> Observed:
    """Take a turn."""
    result = environment.step(action)
    info: Any = {}
    truncated = False
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, done, truncated, info = result
    elif isinstance(result, tuple) and len(result) == 4:
        observation, reward, done, info = result
    elif isinstance(result, Mapping) and {"observations", "reward", "done"} <= result.keys():
        observation, reward, done = (result[key] for key in ("observations", "reward", "done"))
    elif all(hasattr(result, name) for name in RESULT):
        observation, reward, done = (getattr(result, name) for name in RESULT)
    else:
        raise TypeError(f"step returned {result!r:.80}, and should return {STEP_SHAPES}")
    is_over = bool(done) or bool(truncated)
    return Observed(
        None if is_over else _observation(observation, info, as_text),
        _number(reward),
        truncated=bool(truncated) and not bool(done),
    )


def _observation(value: Any, info: Any, as_text: Callable[[Any], Any] | None) -> Reply:
    """Return an observation as text or messages, with the suffix that GEM keeps in the info."""
    if as_text is not None:
        value = as_text(value)
    if not is_reply(value):
        raise TypeError(
            f"the observation {value!r:.80} is neither text nor chat messages: name a function "
            "that makes text of it with task.observation"
        )
    suffix = info.get("suffix") if isinstance(info, Mapping) else None
    if isinstance(value, str):
        return f"{value}\n{suffix}" if isinstance(suffix, str) and suffix else value
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _number(reward: Any) -> float:
    if reward is None:  # OpenEnv has no reward before the end
        return 0.0
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise TypeError(f"the reward {reward!r:.80} is not a finite number")
    return float(reward)


def _takes(function: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return False
    kinds = [parameter.kind for parameter in parameters.values()]
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds
