"""The result of an inspection, as plain values for tables, pages and programs."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from trustbatch.inspection.gradients import Estimate
from trustbatch.inspection.token_summary import TokenSummary
from trustbatch.utils.rendering import as_html


@dataclass(frozen=True)
class GradientSummary:
    """What is known of the update that an objective would make."""

    norm: float
    """before `training.gradient_clip`"""
    learning_rate_factor: float
    """by which the objective scales the learning rate of the step"""
    cosines: dict[str, float]
    """with the gradient of each objective, by label"""
    fresh_cosine: Estimate | None
    """with the gradient on fresh rollouts; None if that is not distinguishable from noise"""
    entropy_drift: Estimate | None
    """first-order change of the policy's entropy, nats a token, for a step of length 1"""
    drift_beyond_unclipped: Estimate | None
    """the same minus that of r A, on the same fresh tokens"""


@dataclass(frozen=True)
class ObjectiveRow:
    """One objective."""

    label: str
    is_own: bool
    """whether the run trains with it"""
    tokens: TokenSummary
    gradient: GradientSummary | None
    """None where the weights of the policy are gone"""


@dataclass(frozen=True)
class FreshSummary:
    """The fresh rollouts that the updates are compared with."""

    num_parts: int
    num_completions: int
    mean_reward: float
    has_signal: bool
    """whether some group has unequal rewards"""
    norm: Estimate | None
    """of the gradient behind the noise; None if that can't be distinguished from it"""
    entropy: float
    """of the policy, nats a token"""


@dataclass(frozen=True)
class ShownToken:
    """A token of a completion, with the weight that each objective gives it."""

    text: str
    ratio: float
    weights: list[float]
    """in the order of the rows"""


@dataclass(frozen=True)
class ShownCompletion:
    """A completion whose tokens are shown."""

    advantage: float
    tokens: list[ShownToken]
    num_left_out: int


@dataclass(frozen=True, repr=False)
class Inspection:
    """What every objective would do to the batch of a step."""

    run: str
    step: int
    is_logged: bool
    """whether it is from logged tokens, without the policy's weights"""
    num_completions: int
    num_tokens: int
    num_with_advantage: int
    rollout_temperature: float
    policy_temperature: float
    one_minus_ess: float
    bin_shares: list[float]
    """of the tokens with an advantage, in each bin of the ratio"""
    rows: list[ObjectiveRow]
    fresh: FreshSummary | None
    num_coordinates: int
    """of each gradient that were kept"""
    num_parameters: int
    notes: list[str] = field(default_factory=list)
    """what a reader must know to read the numbers"""
    findings: list[str] = field(default_factory=list)
    """what they say"""
    completions: list[ShownCompletion] = field(default_factory=list)

    @property
    def own(self) -> ObjectiveRow:
        """The objective that the run trains with."""
        return next(row for row in self.rows if row.is_own)

    def __repr__(self) -> str:
        from trustbatch.inspection.terminal import headline

        return "\n".join([headline(self), *self.findings])

    def _repr_html_(self) -> str:
        from trustbatch.inspection.terminal import show

        return as_html(lambda console: show(console, self))


def to_record(inspection: Inspection) -> dict[str, Any]:
    """Return values for JSON, which has no NaN."""
    return _plain(asdict(inspection))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
