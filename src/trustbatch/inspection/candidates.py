"""The objectives that are compared: the known ones, the run's own and a user's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from trustbatch.config.loading import apply_override
from trustbatch.config.objective import ObjectiveConfig
from trustbatch.errors import ConfigError, TrustbatchError, first_line
from trustbatch.objectives import OBJECTIVES, Objective, TokenBatch, Totals
from trustbatch.objectives.estimators import bounded
from trustbatch.objectives.metrics import Metrics
from trustbatch.utils.system_errors import is_shortage

ALL = "all"
"""stands for every objective with a name"""
UNCLIPPED = "unclipped"


@dataclass(frozen=True, kw_only=True)
class Unclipped(Objective):
    """loss = -(1/N) sum r A: importance sampling as it is, which others clip, cap or damp."""

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return -(1/N) sum r A."""
        ratio = bounded(tokens.logp - tokens.behavior_logp).exp()
        return -totals.per_token(ratio * tokens.advantage), {}


@dataclass(frozen=True, kw_only=True)
class MeanEntropy(Objective):
    """loss = -(1/N) sum H, so that its gradient is that of the entropy, with the other sign."""

    entropy_coef: float = 1.0

    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return 0: the entropy is a term that all objectives have."""
        return 0.0 * tokens.logp.sum(), {}


@dataclass(frozen=True)
class Candidate:
    """An objective with its name in the tables."""

    label: str
    objective: Objective
    is_own: bool = False
    """whether the run trains with it"""

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Say which objective has failed, if it is a user's own."""
        try:
            yield
        except Exception as error:  # a user's code may raise anything; the cause stays attached
            is_users = ":" in self.label and not isinstance(error, TrustbatchError)
            if not is_users or is_shortage(error):
                raise
            raise ConfigError(
                f"The objective {self.label!r} failed with {type(error).__name__}: "
                f"{first_line(error)}; fix it, or leave it out."
            ) from error


def choose_candidates(
    own: ObjectiveConfig, words: Sequence[str], *, has_top_logp: bool
) -> list[Candidate]:
    """Return the run's own objective and those that the words name, each once.

    A word is "all", a name or module:Class, with options after a space: "grpo clip_high=0.4".
    `has_top_logp` is whether the batch has the log-probs of the most likely tokens.
    """
    built = own.build()
    usual = built.resolved(has_top_logp=has_top_logp)
    found = [Candidate(_label(own.name, usual, has_top_logp), usual, is_own=True)]
    for word in words:
        for label in OBJECTIVES if word == ALL else (word,):
            objective = _build(label).resolved(has_top_logp=has_top_logp)
            if not any(each.objective == objective for each in found):
                found.append(Candidate(label, objective))
    if not has_top_logp:
        _refuse_without_top(found)
    return [*found, Candidate(UNCLIPPED, Unclipped())]


def without_weights(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return them without the terms that need the model; the weights of tokens are the same."""
    changes: dict[str, Any] = {"entropy_coef": 0.0, "reference_kl_coef": 0.0}
    return [replace(each, objective=replace(each.objective, **changes)) for each in candidates]


def without_top(own: ObjectiveConfig) -> ObjectiveConfig:
    """Return it with its KL by sampled tokens, which leaves the weights of tokens what they are."""
    if not own.build().needs_top_logp or "kl" not in own.options:
        return own
    options = {key: value for key, value in own.options.items() if key != "kl"}
    return own.model_copy(update={"options": options})


def anchored(candidates: Sequence[Candidate]) -> list[str]:
    """Return the labels of those that pull to the model that sampled the tokens."""
    return [each.label for each in candidates if each.objective.needs_anchor]


def refuse_without_reference(candidates: Sequence[Candidate]) -> None:
    """Refuse a KL to a reference policy that the run does not have."""
    for each in candidates:
        if each.objective.reference_kl_coef:
            raise ConfigError(
                f"--objective {each.label}: the run has no reference policy, so leave out "
                "reference_kl_coef."
            )


def _build(word: str) -> Objective:
    name, *settings = word.split() or [""]
    tree: dict[str, Any] = {"name": name}
    for setting in settings:
        apply_override(tree, f"--{setting}")
    try:
        return ObjectiveConfig.model_validate(tree).build()
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--objective {word}: {message}") from None


def _label(name: str, objective: Objective, has_top_logp: bool) -> str:
    """Return the name with those options that are not the defaults."""
    make: Callable[[], Objective] = type(objective)
    try:
        usual = make().resolved(has_top_logp=has_top_logp)
    except TypeError:  # an option without a default
        return name
    names = [field.name for field in fields(usual)]
    own = {each: getattr(objective, each) for each in names}
    changed = [f"{key}={value}" for key, value in own.items() if value != getattr(usual, key)]
    return " ".join([name, *changed])


def _refuse_without_top(candidates: Sequence[Candidate]) -> None:
    for each in candidates:
        if each.objective.needs_top_logp:
            raise ConfigError(
                f"The objective {each.label!r} needs the log-probs of the most likely tokens, "
                "which this batch lacks: leave it out, or set kl=importance."
            )
