"""A mixture of policies: the trained one and frozen second policies, on the same prompts."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from trustbatch.errors import ConfigError
from trustbatch.rollout.config import SecondPolicyConfig
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.types import Completion, GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class SecondPolicy:
    """An engine with a frozen model, and the share of each group that it samples."""

    name: str
    engine: RolloutEngine
    share: float
    context_length: int
    temperature: float | None = None
    """default: that of the request, like the next two"""
    top_p: float | None = None
    top_k: int | None = None

    def sampling(self, requested: SamplingParams) -> SamplingParams:
        """Return this policy's sampling parameters for a request's."""
        return sampling_of(self, requested)

    def refuse_too_long(self, request: GenerationRequest) -> None:
        """Refuse a prompt that leaves no room for the completion in this model's context."""
        if len(request.token_ids) + request.sampling.max_tokens > self.context_length:
            raise ConfigError(
                f"Prompt {request.prompt_id!r} has {len(request.token_ids)} tokens, which with "
                f"max_tokens = {request.sampling.max_tokens} is more than the context of "
                f"{self.context_length} of the second policy {self.name!r}: lower max_tokens or "
                "leave out long prompts."
            )


def sampling_of(
    second: SecondPolicy | SecondPolicyConfig, requested: SamplingParams
) -> SamplingParams:
    """Return `requested` with the second policy's own values where it has some."""
    own = {"temperature": second.temperature, "top_p": second.top_p, "top_k": second.top_k}
    changes = {key: value for key, value in own.items() if value is not None}
    return dataclasses.replace(requested, **changes)


class MixedEngine:
    """Divides the samples of each group between the trained policy's engine and second policies.

    The trained policy has the first samples of a group and the others follow, in the order of the
    configuration; `division` says how many each has. A request that names a policy is sampled by it
    alone. Version and weights are the trained policy's: second policies are frozen.
    """

    def __init__(self, trained: RolloutEngine, others: Sequence[SecondPolicy]) -> None:
        self.trained = trained
        self.others = tuple(others)

    @property
    def version(self) -> int:
        """Version of the trained policy's weights."""
        return self.trained.version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return all completions, in the order of the requests, then of their samples."""
        counts = [self._counts(request) for request in requests]
        by_policy = [
            self._sample(number, requests, counts) for number in range(1 + len(self.others))
        ]
        return [
            completion
            for number in range(len(requests))
            for by_request in by_policy
            for completion in by_request[number]
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pass new parameters to the trained policy's engine."""
        self.trained.load_weights(weights, version)

    def sleep(self) -> None:
        """Let every engine free its memory."""
        for engine in self._engines:
            engine.sleep()

    def wake(self) -> None:
        """Get every engine ready."""
        for engine in self._engines:
            engine.wake()

    def close(self) -> None:
        """End every engine."""
        for engine in self._engines:
            engine.close()

    @property
    def _engines(self) -> list[RolloutEngine]:
        return [self.trained, *(policy.engine for policy in self.others)]

    def _counts(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the number of samples of each policy, the trained one first."""
        if request.policy is None:
            shares = [policy.share for policy in self.others]
            return division(shares, request.num_samples, group=request.group)
        # one policy samples all turns of an episode
        second = [request.num_samples * (each.name == request.policy) for each in self.others]
        return (request.num_samples - sum(second), *second)

    def _sample(
        self, number: int, requests: Sequence[GenerationRequest], counts: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """Sample one policy's part of every request; policy 0 is the trained one."""
        second = self.others[number - 1] if number else None
        parts = []
        for request, count in zip(requests, counts, strict=True):
            if not count[number]:
                continue
            if second is not None:
                second.refuse_too_long(request)
            parts.append(
                dataclasses.replace(
                    request,
                    num_samples=count[number],
                    first_sample=request.first_sample + sum(count[:number]),
                    sampling=second.sampling(request.sampling) if second else request.sampling,
                )
            )
        completions = iter(self._engines[number].generate(parts) if parts else ())
        return [[next(completions) for _ in range(count[number])] for count in counts]


def division(shares: Sequence[float], num_samples: int, *, group: int) -> tuple[int, ...]:
    """Return the number of samples of each policy in a group, the trained one first.

    A policy with share s has s * num_samples, rounded down in some groups and up in others. The
    rounding depends on the group's index only, such that the long-run share is exact: the bounds
    between policies are shifted by a low-discrepancy sequence before they are rounded.

    Example: with shares (0.3,) and 8 samples, groups 0, 1, 2, ... get (5, 3), (6, 2), (5, 3), ...
    """
    second = [Fraction(str(share)) for share in shares]  # 0.3 is 3/10, not its nearest float
    shift = _radical_inverse(group)
    bounds = [0]
    position = Fraction(0)
    for share in [1 - sum(second), *second]:
        position += share
        bounds.append(math.floor(num_samples * position + shift))
    return tuple(upper - lower for lower, upper in itertools.pairwise(bounds))


def _radical_inverse(number: int) -> Fraction:
    """Mirror the binary digits at the point: 0, 1/2, 1/4, 3/4, 1/8, ... cover [0, 1) evenly."""
    digits = f"{number:b}"[::-1]
    return Fraction(int(digits, 2), 2 ** len(digits))
