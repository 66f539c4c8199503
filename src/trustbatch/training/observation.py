"""What a step of training reports of its tokens: ratios by source, the ledger, token records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.objectives import Objective, TokenBatch, Totals
from trustbatch.objectives.estimators import bounded, kl_importance, kl_top_k
from trustbatch.objectives.metrics import Metrics
from trustbatch.objectives.token_weights import token_weights
from trustbatch.training.ledger import Ledger
from trustbatch.training.ratio_metrics import lag_ratios, lags_of, policy_ratios
from trustbatch.types import TrainSequence
from trustbatch.utils.distributed import all_gather

Key = tuple[str, int]
"""of a completion"""
TokenColumns = dict[str, Tensor]
"""values [num_sampled] of the policy's tokens, by name"""


@dataclass(kw_only=True)
class Observation:
    """What is wanted of a step beside its metrics, and what was found."""

    ledger: bool = False
    """whether its metrics include the ledger"""
    recorded: frozenset[Key] = frozenset()
    """completions whose tokens are recorded"""
    tokens: dict[Key, TokenColumns] = field(default_factory=dict)
    """filled in by the trainer"""


class StepObserver(Protocol):
    """Sees the tokens of an optimizer step, one micro-batch after the other."""

    @property
    def wants_initial(self) -> bool:
        """Whether the log-probs before the first update are wanted of every token; on all ranks."""
        ...

    def keep_initial(self, logp: Mapping[Key, Tensor]) -> None:
        """Take note of the log-probs of some completions before the first update."""
        ...

    def measure(self, tokens: TokenBatch, batch: MicroBatch, totals: Totals) -> Metrics:
        """Return metrics of a micro-batch; the totals are those of its optimizer step."""
        ...


class TokenObserver:
    """Follows the tokens of one batch through the optimizer steps on it."""

    def __init__(
        self,
        wanted: Observation,
        objective: Objective,
        sequences: Sequence[TrainSequence],
        *,
        policy: str,
        version: int | None,
        temperature: float,
    ) -> None:
        self.wanted = wanted
        self.objective = objective
        self.policy = policy
        self.version = version
        policies = {sequence.completion.provenance.policy for sequence in sequences}
        self._by_policy = len(policies) > 1
        self._by_lag = version is not None and bool(
            lags_of(sequences, policy=policy, version=version) - {0}
        )
        self._ledger = None
        if wanted.ledger and version is not None:
            self._ledger = Ledger.of(
                sequences, policy=policy, version=version, temperature=temperature
            )
        self._initial: dict[Key, Tensor] = {}
        """log-probs before the first update"""
        self._is_first_pass = True

    @property
    def wants_initial(self) -> bool:
        """Whether the log-probs before the first update are wanted of every token; on all ranks."""
        return self._ledger is not None and self._is_first_pass

    def keep_initial(self, logp: Mapping[Key, Tensor]) -> None:
        """Take note of the log-probs of some completions before the first update."""
        self._initial |= logp

    def end_pass(self, *, is_last: bool) -> None:
        """Share what was noted: in the next pass the sequences are on other ranks. Collective."""
        if self.wants_initial and not is_last:
            # copies: views would be sent with the values of their whole batch
            own = {key: logp.clone() for key, logp in self._initial.items()}
            self._initial = _merged(all_gather(own))
        self._is_first_pass = False

    def measure(self, tokens: TokenBatch, batch: MicroBatch, totals: Totals) -> Metrics:
        """Return metrics of a micro-batch at its optimizer step, and record what is wanted."""
        metrics: Metrics = {}
        if self._by_policy:
            metrics |= policy_ratios(tokens, batch.policies)
        if self._by_lag:
            assert self.version is not None
            metrics |= lag_ratios(tokens, batch, policy=self.policy, version=self.version)
        if self._ledger is None and not self.wanted.recorded:
            return metrics
        current = batch.by_completion(tokens.logp.detach())
        if self._is_first_pass:  # what was not noted before is at its first step, on which it is
            self._initial = current | self._initial
        known = [self._initial.get(key, own).to(own) for key, own in current.items()]
        initial = torch.cat([tokens.logp[:0].detach(), *known])
        if self._ledger is not None:
            metrics |= self._ledger.measure(tokens, batch, initial)
        if self._is_first_pass:
            self._record(tokens, batch, totals, initial)
        return metrics

    def finish(self) -> None:
        """Hand over the records of all ranks. Collective."""
        if self.wanted.recorded:
            self.wanted.tokens = _merged(all_gather(self.wanted.tokens))

    def _record(
        self, tokens: TokenBatch, batch: MicroBatch, totals: Totals, initial: Tensor
    ) -> None:
        """Record completions at their optimizer step in the first pass."""
        recorded = self.wanted.recorded & {completion.key for completion in batch.completions}
        if not recorded:
            return
        columns = {
            name: batch.by_completion(values.cpu())
            for name, values in _columns(self.objective, tokens, batch, totals, initial).items()
        }
        for key in recorded:
            # a copy: a view would keep the values of the whole batch
            self.wanted.tokens[key] = {name: of[key].clone() for name, of in columns.items()}


@torch.no_grad()
def _columns(
    objective: Objective, tokens: TokenBatch, batch: MicroBatch, totals: Totals, initial: Tensor
) -> TokenColumns:
    """Return what is recorded of each token [T]."""
    log_ratio = bounded(tokens.logp - tokens.behavior_logp)
    columns = {
        "policy_logp": initial,
        "ratio": log_ratio.exp(),
        "weight": token_weights(objective, tokens, totals),
        "kl": _kl(tokens, batch, log_ratio).clamp(min=0.0),  # rounding may be below
    }
    if tokens.entropy is not None:
        columns["entropy"] = tokens.entropy
    return columns


def _kl(tokens: TokenBatch, batch: MicroBatch, log_ratio: Tensor) -> Tensor:
    """Return KL(pi || the model that sampled) at each token, by the best estimate there is."""
    if tokens.top_logp is not None and batch.behavior_top_logp is not None:
        anchor_top = batch.anchor_top_logp
        return kl_top_k(
            tokens.top_logp, batch.behavior_top_logp if anchor_top is None else anchor_top
        )
    anchor = tokens.behavior_logp if batch.anchor_logp is None else batch.anchor_logp
    return kl_importance(log_ratio, tokens.logp - anchor, anchor - tokens.behavior_logp)


def _merged(parts: Sequence[Mapping[Key, Any]]) -> dict[Key, Any]:
    return {key: value for part in parts for key, value in part.items()}
