"""Gradients of many objectives in little memory, and what can be said of them.

Of a large model a fixed random subset of coordinates is kept, in float32 on the CPU, scaled so that
the product of two is an unbiased estimate of the whole one. Norms are those of all coordinates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.models.policy import Policy

MAX_COORDINATES = 2**24
"""64 MiB a gradient"""


@dataclass(frozen=True)
class Gradient:
    """One gradient."""

    values: Tensor
    """[d] float32 on the CPU: the coordinates that are kept"""
    norm: float
    """of all coordinates"""


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error."""

    value: float
    standard_error: float


class Coordinates:
    """The coordinates of a policy's gradient that are kept: all of them, or a random subset."""

    def __init__(self, policy: Policy, *, most: int = MAX_COORDINATES) -> None:
        self._parameters = [parameter for _, parameter in policy.trained_parameters()]
        sizes = [parameter.numel() for parameter in self._parameters]
        self.num_all = sum(sizes)
        self.num_kept = 0
        self._chosen: list[tuple[Tensor | None, float]] = []
        generator = torch.Generator().manual_seed(0)
        for size in sizes:
            kept = math.ceil(size * most / self.num_all) if self.num_all > most else size
            if kept < size:
                # with replacement: a parameter has far more coordinates than are kept of it
                index = torch.randint(size, (kept,), generator=generator)
                self._chosen.append((index, math.sqrt(size / kept)))
            else:
                self._chosen.append((None, 1.0))
            self.num_kept += kept

    def read(self) -> Gradient:
        """Read the gradient that is in `.grad` now."""
        parts, norms = [], []
        for parameter, (index, scale) in zip(self._parameters, self._chosen, strict=True):
            kept = parameter.numel() if index is None else len(index)
            if parameter.grad is None:
                parts.append(torch.zeros(kept))
                continue
            gradient = parameter.grad.detach().flatten()
            norms.append(float(torch.linalg.vector_norm(gradient.float())))
            if index is not None:
                gradient = gradient[index.to(gradient.device)]
            parts.append(gradient.float().cpu() * scale)
        return Gradient(torch.cat(parts), math.hypot(*norms) if norms else 0.0)


def dot(one: Gradient, other: Gradient) -> float:
    """Return the product of two gradients."""
    return float(one.values.double() @ other.values.double())


def cosine(one: Gradient, other: Gradient) -> float:
    """Return the cosine of two gradients; NaN if one of them is 0."""
    size = math.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / size if size else math.nan


class FreshGradient:
    """The mean of several independent estimates of one gradient, and how well it is known."""

    def __init__(self, parts: Sequence[Gradient]) -> None:
        self.parts = list(parts)
        products = [[dot(a, b) for b in parts] for a in parts]
        self._products = torch.tensor(products, dtype=torch.float64)

    def norm(self) -> Estimate | None:
        """Return the norm of the gradient behind the noise.

        The mean of the products of different parts is its square: their noise is independent, and
        that of the mean itself would make it longer. None if noise is all there is.
        """
        return _jackknife(len(self.parts), lambda used: _root(self._square(used)))

    def cosine_with(self, update: Gradient) -> Estimate | None:
        """Return the cosine of an update and the gradient behind the noise."""
        size = math.sqrt(dot(update, update))
        if not size:
            return None
        along = torch.tensor([dot(update, part) / size for part in self.parts], dtype=torch.float64)

        def estimate(used: Tensor) -> float:
            return float(along[used].mean()) / _root(self._square(used))

        return _jackknife(len(self.parts), estimate)

    def _square(self, used: Tensor) -> float:
        products = self._products[used][:, used]
        count = len(used)
        return float((products.sum() - products.trace()) / (count * (count - 1)))


def drifts(update: Gradient, entropies: Sequence[Gradient]) -> Tensor:
    """Return the change of entropy for a step of length 1 against the gradient of an update.

    `entropies` are gradients of *minus* the mean entropy, one for each part of fresh tokens.
    """
    size = update.norm or math.nan
    return torch.tensor([dot(update, each) / size for each in entropies], dtype=torch.float64)


def mean_of(values: Tensor) -> Estimate:
    """Return the mean of independent values [M]."""
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(len(values))))


def _root(square: float) -> float:
    return math.sqrt(square) if square > 0 else math.nan


def _jackknife(count: int, estimate: Callable[[Tensor], float]) -> Estimate | None:
    """Return an estimate from all parts, with the error by leaving out each of them in turn."""
    everything = torch.arange(count)
    whole = estimate(everything)
    left_out = [estimate(everything[everything != number]) for number in range(count)]
    if not all(map(math.isfinite, (whole, *left_out))):
        return None
    mean = sum(left_out) / count
    variance = (count - 1) / count * sum((each - mean) ** 2 for each in left_out)
    return Estimate(whole, math.sqrt(variance))
