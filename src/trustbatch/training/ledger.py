"""The ledger: how far a batch is off-policy, by cause.

The log-ratio of a token leads from the distribution it was sampled from to the policy that is being
updated, past points that are known for some or all tokens:

    sampled from -> model that sampled -> trainer at that version -> before the update -> now
             sampling             engine                     lag                updates

*Sampling* is temperature and truncation, *engine* precision and kernels, *lag* the versions since,
*updates* those of this step. Where a point is not known, the causes on both sides of it are one. Of
another policy's tokens all after its sampling is *other_policies*. The parts of a token add up to
its log-ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.objectives import TokenBatch
from trustbatch.objectives.estimators import RatioMoments
from trustbatch.objectives.metrics import LogRatioPart, Mean, Metrics, OneMinusEss
from trustbatch.types import Completion, SamplingParams, TrainSequence

CAUSES = (
    "sampling",
    "engine",
    "sampling_and_engine",
    "lag",
    "engine_and_lag",
    "sampling_engine_and_lag",
    "other_policies",
    "updates",
)
ALWAYS = ("sampling", "engine", "updates")
"""are reported even if no token of the batch has them"""
POSITIONS = (0, 16, 64, 256, 1024, 4096)
"""first positions of the bins in a completion"""
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9)
"""lower ends of the bins of the probability with which a token was sampled"""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Measures a batch on which `policy`, at `version` before the update, is trained."""

    policy: str
    version: int
    temperature: float
    """of the trained policy"""
    causes: tuple[str, ...]

    @classmethod
    def of(
        cls, sequences: Sequence[TrainSequence], *, policy: str, version: int, temperature: float
    ) -> "Ledger":
        """Return the ledger of a batch, with the causes that it can have."""
        ledger = cls(policy=policy, version=version, temperature=temperature, causes=CAUSES)
        completions = [sequence.completion for sequence in sequences]
        found = {cause for each in completions for cause in ledger._causes_of(each)}
        return cls(
            policy=policy,
            version=version,
            temperature=temperature,
            causes=tuple(cause for cause in CAUSES if cause in found or cause in ALWAYS),
        )

    def measure(self, tokens: TokenBatch, batch: MicroBatch, initial_logp: Tensor) -> Metrics:
        """Return 1-ESS, mean ratio and share of each cause, and the first two per bin.

        `initial_logp` [T] is of the policy before the first update on this batch.
        """
        parts = self.parts(tokens, batch, initial_logp)
        kept = tokens.measurable(*parts.values())
        log_ratio = (tokens.logp.detach().double() - tokens.behavior_logp.double())[kept]
        metrics: Metrics = {
            f"ledger/{cause}": LogRatioPart.of(part[kept], log_ratio)
            for cause, part in parts.items()
        }
        probability = tokens.behavior_logp.exp()[kept]
        metrics |= _binned(
            "position", _positions(batch).to(kept.device)[kept], POSITIONS, log_ratio
        )
        metrics |= _binned("probability", probability, PROBABILITIES, log_ratio)
        return metrics

    @torch.no_grad()
    def parts(
        self, tokens: TokenBatch, batch: MicroBatch, initial_logp: Tensor
    ) -> dict[str, Tensor]:
        """Return the part [T] of each cause in float64; they add up to the log-ratios."""
        behavior = tokens.behavior_logp.double()
        initial, now = initial_logp.double(), tokens.logp.detach().double()
        anchor = behavior if batch.anchor_logp is None else batch.anchor_logp.double()
        is_own = _per_token(batch, [c.provenance.policy == self.policy for c in batch.completions])
        knows_anchor = _per_token(batch, [self._knows_anchor(c) for c in batch.completions])
        sampled_at = self._version_logp(batch, initial)  # NaN where unknown
        knows_version = is_own & ~sampled_at.isnan()
        before = torch.where(knows_anchor, anchor, behavior)
        engine = torch.where(knows_version, sampled_at - before, 0.0)
        joint = torch.where(is_own & ~knows_version, initial - before, 0.0)
        parts = {
            "sampling": before - behavior,
            "engine": torch.where(knows_anchor, engine, 0.0),
            "sampling_and_engine": torch.where(knows_anchor, 0.0, engine),
            "lag": torch.where(knows_version, initial - sampled_at, 0.0),
            "engine_and_lag": torch.where(knows_anchor, joint, 0.0),
            "sampling_engine_and_lag": torch.where(knows_anchor, 0.0, joint),
            "other_policies": torch.where(is_own, 0.0, initial - before),
            "updates": now - initial,
        }
        return {cause: parts[cause] for cause in self.causes}

    def _knows_anchor(self, completion: Completion) -> bool:
        """Whether the model's own log-probs are recorded, or are those sampled from."""
        if completion.anchor_logp is not None:
            return True
        made = completion.provenance
        sampling = SamplingParams(
            max_tokens=1,
            stop_token_ids=(),
            temperature=made.temperature,
            top_p=made.top_p,
            top_k=made.top_k,
            logprob_mode=made.logprob_mode,
            anchor_temperature=self.temperature,
        )
        return not sampling.records_anchor

    def _causes_of(self, completion: Completion) -> set[str]:
        if completion.provenance.policy != self.policy:
            return {"other_policies"}
        knows_anchor = self._knows_anchor(completion)
        engine = "engine" if knows_anchor else "sampling_and_engine"
        if all(version == self.version for version in completion.all_versions):
            return {engine}
        if completion.version_logp is not None:
            return {engine, "lag"}
        return {engine, "engine_and_lag" if knows_anchor else "sampling_engine_and_lag"}

    def _version_logp(self, batch: MicroBatch, initial: Tensor) -> Tensor:
        """Return the trainer's log-probs [T] by the version that sampled; NaN where unknown."""
        parts, by_completion = [], batch.by_completion(initial)
        for completion in batch.completions:
            own = by_completion[completion.key]
            if completion.version_logp is not None:
                parts.append(completion.of_policy(completion.version_logp).to(own))
            else:
                is_current = completion.version_of_token.to(own.device) == self.version
                parts.append(torch.where(is_current, own, torch.nan))
        return torch.cat([initial[:0], *parts])


def _per_token(batch: MicroBatch, flags: list[bool]) -> Tensor:
    """Return the flag of each token's sequence, [T] bool."""
    return torch.tensor(flags, dtype=torch.bool, device=batch.sequence.device)[batch.sequence]


def _positions(batch: MicroBatch) -> Tensor:
    """Return the position [T] of each token among those that were sampled in its completion."""
    lengths = [completion.num_sampled for completion in batch.completions]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *map(torch.arange, lengths)])


def _binned(what: str, values: Tensor, edges: Sequence[float], log_ratio: Tensor) -> Metrics:
    """Return 1-ESS and mean ratio of the tokens in each bin that has any."""
    metrics: Metrics = {}
    for low, high in zip(edges, [*edges[1:], torch.inf], strict=True):
        inside = (values >= low) & (values < high)
        if not inside.any():
            continue
        moments = RatioMoments.of(log_ratio[inside])
        name = f"ledger/{what}/{_bin_name(what, low, high)}"
        metrics[f"{name}/one_minus_ess"] = OneMinusEss(moments)
        metrics[f"{name}/ratio_mean"] = Mean(moments.ratio_sum, moments.count)
    return metrics


def _bin_name(what: str, low: float, high: float) -> str:
    if what == "probability":
        return f"{low:g}-{min(high, 1.0):g}"
    return f"{low:g}-{high - 1:g}" if high < torch.inf else f"{low:g}-"
