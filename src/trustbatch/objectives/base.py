"""The base class of objectives: totals of an optimizer step, common loss terms and metrics."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from trustbatch.objectives.estimators import RatioMoments, bounded, kl_importance, kl_k3
from trustbatch.objectives.metrics import (
    Count,
    EffectiveSampleSize,
    Max,
    Mean,
    Metrics,
    RatioQuantiles,
    Share,
)
from trustbatch.objectives.token_batch import TokenBatch

ClipKind = Literal["token", "mask", "probability", "sequence"]
"""clips the token's ratio, masks by it, bounds probabilities, or clips the sequence's ratio"""


@dataclass(frozen=True)
class Totals:
    """Sums over a whole optimizer step that the loss of each micro-batch depends on.

    Totals add: the totals of a step are the sum over its micro-batches and ranks.
    """

    num_tokens: Tensor
    num_sequences: Tensor
    moments: dict[str, RatioMoments] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """float64, of any shape: other sums over the step"""
    pools: dict[str, Tensor] = field(default_factory=dict)
    """[n] float64, in no particular order: individual values of the whole step"""

    def per_token(self, values: Tensor) -> Tensor:
        """Return the sum of values divided by the step's number of tokens; 0 if it has none."""
        return values.sum() / self.num_tokens.clamp(min=1.0).to(values.dtype)

    def per_sequence(self, values: Tensor) -> Tensor:
        """Return the sum of values divided by the step's number of sequences."""
        return values.sum() / self.num_sequences.clamp(min=1.0).to(values.dtype)

    def to(self, device: torch.device) -> "Totals":
        """Move every tensor: totals gathered over ranks are in host memory."""
        return Totals(
            num_tokens=self.num_tokens.to(device),
            num_sequences=self.num_sequences.to(device),
            moments={name: each.to(device) for name, each in self.moments.items()},
            sums={name: each.to(device) for name, each in self.sums.items()},
            pools={name: each.to(device) for name, each in self.pools.items()},
        )

    def __add__(self, other: "Totals") -> "Totals":
        assert self.sums.keys() == other.sums.keys(), "totals of different objectives"
        assert self.pools.keys() == other.pools.keys(), "totals of different objectives"
        return Totals(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            moments=_added(self.moments, other.moments),
            sums={name: self.sums[name] + other.sums[name] for name in self.sums},
            pools={name: torch.cat([self.pools[name], other.pools[name]]) for name in self.pools},
        )

    def __radd__(self, other: int) -> "Totals":
        # sum() starts from the integer 0
        return self if other == 0 else NotImplemented


@dataclass(frozen=True)
class ObjectiveOutput:
    """The loss to call backward on, metrics, and the number of measurable tokens."""

    loss: Tensor
    metrics: Metrics
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """A loss on response tokens that does not depend on how a step is split into micro-batches.

    With N tokens in the whole step, every objective adds to its policy loss

        - entropy_coef (1/N) sum H  +  reference_kl_coef (1/N) sum k3(logp - reference_logp)
    """

    entropy_coef: float = 0.0
    reference_kl_coef: float = 0.0

    needs_proximal: ClassVar[bool] = False
    """whether TokenBatch.proximal_logp must be given"""
    clips_behavior_ratio: ClassVar[ClipKind | None] = None
    """how it zeroes the gradient of tokens whose ratio is already far from 1, if it clips"""
    sees_support: ClassVar[bool] = False
    """whether it pulls back mass that leaves the support of truncated (top-p, top-k) rollouts"""

    def __post_init__(self) -> None:
        require_number("entropy_coef", self.entropy_coef)
        require_number("reference_kl_coef", self.reference_kl_coef)

    @property
    def totals_need_policy(self) -> bool:
        """Whether the totals depend on the policy's log-probs, and so may need a pre-pass."""
        return False

    @property
    def estimates_totals(self) -> bool:
        """Whether totals of a part of a step may stand for all of it, if they are near enough."""
        return False

    def totals_distance(self, one: Totals, other: Totals) -> float:
        """Return how far two totals can move a token's weight, as a fraction of its largest terms.

        Only of objectives with `estimates_totals`.
        """
        raise NotImplementedError

    @property
    def needs_top_logp(self) -> bool:
        """Whether the [T, K] fields must be given."""
        return False

    def resolved(self, *, has_top_logp: bool) -> "Objective":
        """Return the objective with "auto" options replaced by what the [T, K] fields allow."""
        return self

    @property
    def needs_anchor(self) -> bool:
        """Whether it uses the anchor, which engines then record where it differs."""
        return False

    @torch.no_grad()
    def totals(self, batch: TokenBatch, *, all_measurable: bool = False) -> Totals:
        """Return this batch's part of the step's totals, without gradient.

        `all_measurable` says that all tokens are, so that nothing waits for a GPU to find out.
        """
        objective = self.resolved(has_top_logp=batch.top_logp is not None)
        tokens = batch if all_measurable else batch.select(objective.measurable(batch))
        counts = _counts(tokens.sequence, torch.ones_like(tokens.sequence, dtype=torch.bool))
        return replace(
            counts,
            moments=objective.moments(tokens),
            sums=objective.sums(tokens),
            pools=objective.pools(tokens),
        )

    @torch.no_grad()
    def counts(self, batch: TokenBatch) -> Totals:
        """Return the totals without what the objective itself needs; waits for no GPU."""
        return _counts(batch.sequence, self.measurable(batch))

    def __call__(
        self, batch: TokenBatch, totals: Totals, *, all_measurable: bool = False
    ) -> ObjectiveOutput:
        """Return this batch's share of the step's loss, and its metrics.

        Tokens whose log-ratio is not finite are left out and counted. Without any token, the loss
        and its gradient are 0. `all_measurable` says that there are none, as in `totals`.
        """
        objective = self.resolved(has_top_logp=batch.top_logp is not None)
        tokens = batch if all_measurable else batch.select(objective.measurable(batch))
        loss, metrics = objective.policy_loss(tokens, totals)
        if self.entropy_coef:
            entropy = require(tokens.entropy, "entropy", "entropy_coef")
            loss = loss - self.entropy_coef * totals.per_token(entropy)
        if self.reference_kl_coef:
            reference = require(tokens.reference_logp, "reference_logp", "reference_kl_coef")
            reference_kl = kl_k3(tokens.logp - reference)
            loss = loss + self.reference_kl_coef * totals.per_token(reference_kl)
            metrics["kl/reference"] = Mean.of(reference_kl)
        metrics |= {"policy/loss": Share(loss.detach()), **ratio_metrics(batch, tokens)}
        return ObjectiveOutput(loss, metrics, num_tokens=len(tokens))

    def moments(self, tokens: TokenBatch) -> dict[str, RatioMoments]:
        """Ratio moments that this objective needs of the whole step (default: none)."""
        return {}

    def sums(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """Other float64 sums that this objective needs of the whole step (default: none)."""
        return {}

    def pools(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """Individual values [n] that this objective needs of the whole step (default: none).

        They are all sent between ranks, so prefer a sum where it is enough.
        """
        return {}

    def learning_rate_factor(self, totals: Totals) -> float:
        """Factor of the learning rate of this optimizer step."""
        return 1.0

    @abstractmethod
    def policy_loss(self, tokens: TokenBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the policy loss of measurable tokens, divided by the step's totals."""

    def measurable(self, batch: TokenBatch) -> Tensor:
        """[T] bool: tokens of which the loss can be computed."""
        needs = self.resolved(has_top_logp=batch.top_logp is not None)
        compared: list[Tensor | None] = []
        if self.needs_proximal:
            compared.append(require(batch.proximal_logp, "proximal_logp", type(self).__name__))
        if self.reference_kl_coef:
            compared.append(batch.reference_logp)
        if needs.needs_top_logp:
            compared.append(batch.behavior_top_logp)
        if needs.needs_anchor:
            compared += [batch.anchor_logp, batch.anchor_top_logp]
        return batch.measurable(*compared)


def _counts(sequence: Tensor, is_counted: Tensor) -> Totals:
    """Return the number of tokens and of their sequences [T], without waiting for a GPU."""
    one = torch.ones((), dtype=torch.float64, device=sequence.device)
    if not len(sequence):
        return Totals(num_tokens=0 * one, num_sequences=0 * one)
    # unique() would wait for the number of its results
    ids = torch.where(is_counted, sequence - sequence.min() + 1, 0).sort().values
    is_new = torch.cat([ids[:1] > 0, ids.diff() > 0])
    return Totals(num_tokens=one * is_counted.sum(), num_sequences=one * is_new.sum())


@torch.no_grad()
def ratio_metrics(batch: TokenBatch, tokens: TokenBatch) -> Metrics:
    """Return how far the measurable tokens of a batch are off-policy, whatever the objective."""
    log_ratio = bounded(tokens.logp - tokens.behavior_logp)
    number = torch.tensor(len(tokens), dtype=torch.float64)
    kl = kl_importance(log_ratio, log_ratio, torch.zeros_like(log_ratio))
    metrics: Metrics = {
        "ess": EffectiveSampleSize(RatioMoments.of(tokens.logp - tokens.behavior_logp)),
        "ratio": RatioQuantiles((log_ratio,)),
        "ratio/max": Max((log_ratio.exp(),)),
        "kl/behavior": Mean.of(kl),
        "tokens/count": Count(number),
        "tokens/nonfinite": Count(len(batch) - number),
    }
    if tokens.entropy is not None:
        metrics["entropy"] = Mean.of(tokens.entropy)
    return metrics


def _added(one: dict[str, RatioMoments], other: dict[str, RatioMoments]) -> dict[str, RatioMoments]:
    """Add by name; a part of a step may lack a NAME/SOURCE that another part has."""
    kinds = [{name.split("/")[0] for name in moments} for moments in (one, other)]
    assert kinds[0] == kinds[1], "totals of different objectives"
    both = {name: one[name] + other[name] for name in one.keys() & other.keys()}
    return one | other | both


def require(value: Tensor | None, name: str, needed_by: str) -> Tensor:
    """Return an optional field of the batch, or raise an error that names what needs it."""
    if value is None:
        raise ValueError(f"{needed_by} needs TokenBatch.{name}, which is missing.")
    return value


def require_number(name: str, value: float, low: float = 0.0, high: float = math.inf) -> None:
    """Refuse an option that is not a number in [low, high]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or math.isinf(value):
        limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be a number {limits}, not {value!r}.")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse an option that is not one of a few words."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
