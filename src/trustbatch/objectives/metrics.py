"""Metrics that can be reduced: over micro-batches and ranks first, then over optimizer steps.

The type of a metric defines how it is combined, so nothing depends on its name.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from trustbatch.objectives.estimators import RatioMoments, effective_sample_size

ROUNDING = 1e-12
"""variance of log-ratios that differ from 0 by float32's rounding alone"""


class Metric(Protocol):
    """The interface of a metric."""

    def merge(self, other: Self) -> Self:
        """Combine the parts of one optimizer step."""
        ...

    def values(self, name: str) -> dict[str, float]:
        """Return the final numbers by their full names."""
        ...

    @staticmethod
    def over_steps(values: Sequence[float]) -> float:
        """Combine the final numbers of several optimizer steps."""
        ...


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _largest(values: Sequence[float]) -> float:
    return max(values)


def _add_up(values: Sequence[float]) -> float:
    return sum(values)


@dataclass(frozen=True)
class Mean:
    """An average, as a sum and a count."""

    total: Tensor
    count: Tensor
    over_steps = staticmethod(_average)

    @classmethod
    def of(cls, values: Tensor) -> "Mean":
        """Average the elements of a tensor."""
        total = values.detach().sum(dtype=torch.float64)
        return cls(total, torch.tensor(float(values.numel()), dtype=torch.float64))

    def merge(self, other: "Mean") -> "Mean":
        """Pool two samples."""
        return Mean(self.total + other.total, self.count + other.count)

    def values(self, name: str) -> dict[str, float]:
        """Return the average, or nothing where the count is 0."""
        count = float(self.count)
        return {name: float(self.total) / count} if count else {}


@dataclass(frozen=True)
class Share:
    """A micro-batch's part of a value, such as the loss of a step: the parts add up to it."""

    part: Tensor
    over_steps = staticmethod(_average)

    def merge(self, other: "Share") -> "Share":
        """Add two parts of the same optimizer step."""
        return Share(self.part + other.part)

    def values(self, name: str) -> dict[str, float]:
        """Return the sum of the parts."""
        return {name: float(self.part)}


@dataclass(frozen=True)
class Count:
    """A count, added up over micro-batches, ranks and optimizer steps."""

    number: Tensor
    over_steps = staticmethod(_add_up)

    def merge(self, other: "Count") -> "Count":
        """Add two counts."""
        return Count(self.number + other.number)

    def values(self, name: str) -> dict[str, float]:
        """Return the count."""
        return {name: float(self.number)}


@dataclass(frozen=True)
class Max:
    """The largest of some values."""

    parts: tuple[Tensor, ...]
    over_steps = staticmethod(_largest)

    def merge(self, other: "Max") -> "Max":
        """Pool two samples."""
        return Max(self.parts + other.parts)

    def values(self, name: str) -> dict[str, float]:
        """Return the maximum, or nothing where there were no values."""
        largest = [float(part.max()) for part in self.parts if part.numel()]
        return {name: max(largest)} if largest else {}


@dataclass(frozen=True)
class OneMinusEss:
    """1 - e with the normalized effective sample size e of pooled ratios."""

    moments: RatioMoments
    over_steps = staticmethod(_average)

    def merge(self, other: Self) -> Self:
        """Pool the ratios of two batches."""
        return type(self)(self.moments + other.moments)

    def values(self, name: str) -> dict[str, float]:
        """Return 1 - e, or nothing where there is no token."""
        if not float(self.moments.count):
            return {}
        return {name: 1.0 - float(effective_sample_size(self.moments))}


@dataclass(frozen=True)
class EffectiveSampleSize(OneMinusEss):
    """Normalized effective sample size e of a step, with 1 - e for a logarithmic axis."""

    def values(self, name: str) -> dict[str, float]:
        """Return e and 1 - e; without any token e is 0."""
        ess = float(effective_sample_size(self.moments))
        return {name: ess, f"one_minus_{name}": 1.0 - ess}


@dataclass(frozen=True)
class LogRatioPart:
    """A part of the log-ratios l, alone: 1-ESS and mean of its ratios, and its share of Var(l).

    The share is Cov(part, l) / Var(l), so the shares of parts that add up to l add up to 1.
    """

    moments: RatioMoments
    sums: Tensor
    """[5] float64: of 1, part, l, part l and l^2"""
    over_steps = staticmethod(_average)

    @classmethod
    def of(cls, part: Tensor, log_ratio: Tensor) -> "LogRatioPart":
        """Sum over tokens [T]."""
        part, log_ratio = part.double(), log_ratio.double()
        products = (
            torch.ones_like(part),
            part,
            log_ratio,
            part * log_ratio,
            log_ratio.square(),
        )
        return cls(RatioMoments.of(part), torch.stack([each.sum() for each in products]))

    def merge(self, other: "LogRatioPart") -> "LogRatioPart":
        """Pool two samples."""
        return LogRatioPart(self.moments + other.moments, self.sums + other.sums)

    def values(self, name: str) -> dict[str, float]:
        """Return NAME/one_minus_ess, NAME/ratio_mean and, unless l is rounding, NAME/share."""
        count, part, log_ratio, product, square = self.sums.tolist()
        if not count:
            return {}
        covariance = product / count - part * log_ratio / count**2
        variance = square / count - (log_ratio / count) ** 2
        found = {
            f"{name}/one_minus_ess": 1.0 - float(effective_sample_size(self.moments)),
            f"{name}/ratio_mean": float(self.moments.ratio_sum) / count,
        }
        return found | ({f"{name}/share": covariance / variance} if variance > ROUNDING else {})


@dataclass(frozen=True)
class RatioQuantiles:
    """Exact quantiles and mean of the policy ratios: it keeps all log-ratios."""

    log_ratios: tuple[Tensor, ...]
    over_steps = staticmethod(_average)

    LEVELS = (("p01", 0.01), ("p10", 0.10), ("p50", 0.50), ("p90", 0.90), ("p99", 0.99))

    def merge(self, other: "RatioQuantiles") -> "RatioQuantiles":
        """Pool two samples."""
        return RatioQuantiles(self.log_ratios + other.log_ratios)

    def values(self, name: str) -> dict[str, float]:
        """Return NAME/mean and NAME/pXX."""
        pooled = torch.cat(self.log_ratios).double()
        if not len(pooled):
            return {}
        ordered = pooled.sort().values.exp()
        last = len(ordered) - 1
        result = {f"{name}/mean": float(ordered.mean())}
        for suffix, level in self.LEVELS:
            result[f"{name}/{suffix}"] = float(ordered[math.floor(level * last + 0.5)])
        return result


Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Reduce the metrics of all micro-batches of one optimizer step."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def average_over_steps(steps: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Compute the metrics of several optimizer steps and combine them into one set of numbers."""
    collected: dict[str, list[float]] = {}
    rules: dict[str, type[Metric]] = {}
    for metrics in steps:
        for name, metric in metrics.items():
            for full_name, value in metric.values(name).items():
                collected.setdefault(full_name, []).append(value)
                rules[full_name] = type(metric)
    return {name: float(rules[name].over_steps(values)) for name, values in collected.items()}
