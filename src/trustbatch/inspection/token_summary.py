"""What an objective does to the tokens of a batch: whom it silences, caps or raises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch
from trustbatch.objectives import Objective, TokenBatch, Totals
from trustbatch.objectives.metrics import Metrics
from trustbatch.objectives.token_weights import token_weights

SILENCED = 1e-3
"""a weight below this times min(r, 1) is silence"""
CLEAR = 0.01
"""relative difference between weight and ratio that counts"""
EDGES = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
"""of the bins of the ratio, whose mean weights are shown"""
RIGHT_HIGH, RIGHT_LOW = "A>0, r>1", "A>0, r<1"
WRONG_HIGH, WRONG_LOW = "A<0, r>1", "A<0, r<1"
QUADRANTS = (RIGHT_HIGH, WRONG_LOW, RIGHT_LOW, WRONG_HIGH)
"""sign of the advantage and side of the ratio; GRPO's clip can silence the first two"""


@dataclass(frozen=True)
class TokenTable:
    """The T tokens of a batch, whatever the objective; tensors on the CPU."""

    ratio: Tensor
    """[T] of the policy to the behavior policy"""
    advantage: Tensor
    """[T]"""
    sequence: Tensor
    """[T] index of the completion among those of the batch"""
    token_ids: Tensor
    """[T]"""
    position: Tensor
    """[T] in the completion"""


@dataclass(frozen=True)
class TokenSummary:
    """Shares of all tokens with an advantage and a ratio that can be measured."""

    silenced: float
    capped: float
    """w clearly below r, and not silenced"""
    raised: float
    """w clearly above r"""
    silenced_in: dict[str, float]
    """the silenced share by quadrant; its values add up to `silenced` but for tokens with r = 1"""
    mean_weight: dict[str, list[float]]
    """for "A>0" and "A<0", the mean weight in each bin of the ratio; NaN in an empty one"""


class TokenCollector:
    """An observer of the trainer that keeps the tokens of a step, without their graph."""

    wants_initial = False

    def __init__(self) -> None:
        # by micro-batch: one that is computed again replaces what was kept of it
        self._found: dict[int, tuple[TokenBatch, MicroBatch]] = {}

    def keep_initial(self, logp: Mapping[tuple[str, int], Tensor]) -> None:
        """Nothing is updated."""

    def measure(self, tokens: TokenBatch, batch: MicroBatch, totals: Totals) -> Metrics:
        """Keep the tokens; there is no metric of them."""
        everything = torch.ones_like(tokens.sequence, dtype=torch.bool)
        with torch.no_grad():
            self._found[id(batch)] = tokens.select(everything), batch
        return {}

    def weights(self, objective: Objective, totals: Totals) -> Tensor:
        """Return the weight [T] of every token of the step."""
        batches = [tokens for tokens, _ in self._found.values()]
        return weights_of(objective, batches, totals)

    def entropy(self) -> Tensor:
        """Return the policy's entropy [T] at every token of the step."""
        batches = [tokens for tokens, _ in self._found.values()]
        return torch.cat([e.cpu().double() for each in batches if (e := each.entropy) is not None])

    def table(self) -> TokenTable:
        """Return the tokens of the step."""
        batches = list(self._found.values())
        order = torch.cat([batch.order[batch.sequence].cpu() for _, batch in batches])
        return token_table(
            [tokens for tokens, _ in batches],
            sequence=order,
            token_ids=torch.cat([batch.target.cpu() for _, batch in batches]),
        )


def token_table(
    batches: Sequence[TokenBatch], *, sequence: Tensor, token_ids: Tensor
) -> TokenTable:
    """Put the tokens of some micro-batches together."""
    log_ratio = torch.cat([(each.logp - each.behavior_logp).detach().cpu() for each in batches])
    seen: dict[int, int] = {}
    position = []
    for number in sequence.tolist():
        position.append(seen.get(number, 0))
        seen[number] = position[-1] + 1
    return TokenTable(
        ratio=log_ratio.double().exp(),
        advantage=torch.cat([each.advantage.cpu() for each in batches]).double(),
        sequence=sequence,
        token_ids=token_ids,
        position=torch.tensor(position, dtype=torch.int64),
    )


def weights_of(objective: Objective, batches: Sequence[TokenBatch], totals: Totals) -> Tensor:
    """Return the weights [T] of some micro-batches, on the CPU."""
    found = [token_weights(objective, each, totals).cpu().double() for each in batches]
    return torch.cat(found)


def summarize(table: TokenTable, weight: Tensor) -> TokenSummary:
    """Count what happens to the tokens that have an advantage; `weight` is [T]."""
    counted = torch.isfinite(weight) & torch.isfinite(table.ratio) & (table.advantage != 0)
    weight, ratio = weight[counted], table.ratio[counted]
    is_right = table.advantage[counted] > 0
    silenced = weight.abs() <= SILENCED * ratio.clamp(max=1.0)
    quadrants = {
        RIGHT_HIGH: is_right & (ratio > 1),
        RIGHT_LOW: is_right & (ratio < 1),
        WRONG_HIGH: ~is_right & (ratio > 1),
        WRONG_LOW: ~is_right & (ratio < 1),
    }
    return TokenSummary(
        silenced=_share(silenced),
        capped=_share(~silenced & (weight < (1 - CLEAR) * ratio)),
        raised=_share(~silenced & (weight > (1 + CLEAR) * ratio)),
        silenced_in={name: _share(silenced & quadrants[name]) for name in QUADRANTS},
        mean_weight={
            name: _mean_by_bin(weight[side], ratio[side])
            for name, side in (("A>0", is_right), ("A<0", ~is_right))
        },
    )


def bin_shares(table: TokenTable) -> list[float]:
    """Return the share of the tokens with an advantage in each bin of the ratio."""
    ratio = table.ratio[torch.isfinite(table.ratio) & (table.advantage != 0)]
    return [_share(_bins(ratio) == number) for number in range(len(EDGES) + 1)]


def _bins(ratio: Tensor) -> Tensor:
    return torch.bucketize(ratio, torch.tensor(EDGES, dtype=ratio.dtype))


def _mean_by_bin(weight: Tensor, ratio: Tensor) -> list[float]:
    bins = _bins(ratio)
    parts = [weight[bins == number] for number in range(len(EDGES) + 1)]
    return [float(part.mean()) if len(part) else float("nan") for part in parts]


def _share(chosen: Tensor) -> float:
    return float(chosen.double().mean()) if len(chosen) else 0.0
