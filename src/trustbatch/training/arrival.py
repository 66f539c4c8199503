"""Did the last update arrive? Compares how engine and trainer have changed since an earlier check.

Rounding hides a small update from any fixed bound on log-probs. But at the same contexts the same
tokens are sampled again and again, and for these the change of the engine's log-probs can be set
against that of the trainer's: an engine with the new weights shows all of it, one that has kept the
old ones nothing, and an error that the engine always makes cancels. Nothing is concluded before the
change exceeds the noise, so small updates that never arrive add up until they are seen.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from trustbatch.errors import CanaryError
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.linear import round_rows
from trustbatch.training.update_share import UpdateShare
from trustbatch.types import Provenance

HALF = 0.5
ERRORS = 5.0
"""standard errors by which a share is below or above one half"""
SIGNAL_TO_NOISE = 4.0
"""mean square of the trainer's change, in that of the noise, from which on it is judged: where the
trainer rounds too, a healthy engine then still shows three quarters"""
MIN_SURVIVAL = 0.8
"""share of the update that must survive the rounding of the engine's weights"""
NUM_TENSORS, NUM_ROWS = 12, 8
"""weights that are remembered to measure this: enough, as every layer is updated alike"""


@dataclass(frozen=True)
class ContextSample:
    """Tokens that one version of an engine sampled at fixed contexts."""

    version: int
    logp: dict[tuple[int, int], tuple[float, float]]
    """by context and token, the log-probs of trainer and engine"""
    weights: list[Tensor]
    """some rows of the trainer's weights"""


class ArrivalWatch:
    """Remembers what an engine said when its weights were last known to be the trainer's."""

    def __init__(self) -> None:
        self._before: ContextSample | None = None

    def check(self, now: ContextSample, sampled_by: Provenance) -> None:
        """Compare with the earlier check; raises CanaryError if the change never arrived."""
        before = self._before
        if before is None or before.version == now.version:
            self._before = now
            return
        shared = sorted(before.logp.keys() & now.logp.keys())
        if not shared:
            self._before = now
            return
        context = torch.tensor([each for each, _ in shared])
        old = torch.tensor([before.logp[each] for each in shared], dtype=torch.float64)  # [T, 2]
        change = torch.tensor([now.logp[each] for each in shared], dtype=torch.float64) - old
        trainer, engine = change.T
        if float(trainer.square().mean()) < SIGNAL_TO_NOISE * _noise(old, trainer, engine):
            return
        share = UpdateShare.of(engine, trainer, context)
        if share.is_above(HALF, ERRORS):
            self._before = now
        elif share.is_below(HALF, ERRORS) and (
            survival(before.weights, now.weights, sampled_by.precision) >= MIN_SURVIVAL
        ):
            raise CanaryError(
                f"The engine ({sampled_by.engine}, {sampled_by.precision}) reports version "
                f"{sampled_by.version} and has not loaded it: since version {before.version} the "
                f"trainer's log-probs of the same {len(shared)} tokens have changed by "
                f"{float(trainer.abs().mean()):.2g} on average, and the engine shows "
                f"{share.value:.0%} of it; `trustbatch doctor` with the same configuration "
                "searches for the cause."
            )


def _noise(old: Tensor, trainer: Tensor, engine: Tensor) -> float:
    """Return the mean square of what rounding adds to a change of log-probs [T].

    Either what engine and trainer differed by in the earlier check, `old` [T, 2], or what is left
    of the engine's change whether or not the update has arrived: adapters that are still 0 round
    alike on both sides, and later do not. Twice, since both sides round anew after an update.
    """
    left = min(float(engine.square().mean()), float((engine - trainer).square().mean()))
    return 2.0 * max(float((old[:, 1] - old[:, 0]).square().mean()), left)


def weight_rows(policy: Policy) -> list[Tensor]:
    """Return a few rows of the first weights, as an engine gets them; collective."""
    matrices = (tensor for _, tensor in policy.named_weights() if tensor.dim() == 2)
    return [
        tensor[:: max(len(tensor) // NUM_ROWS, 1)][:NUM_ROWS].to("cpu", torch.float32, copy=True)
        for tensor in islice(matrices, NUM_TENSORS)
    ]


def survival(before: list[Tensor], now: list[Tensor], precision: str) -> float:
    """Return the share of a change of weights that is left where an engine has rounded them.

    An engine in bfloat16 may get an update that is too small to change a single weight. It then
    samples from the old policy by no fault of its own.
    """
    if precision == "float32":
        return 1.0
    if precision not in ("bfloat16", "fp8"):
        return 0.0  # an unknown rounding
    product = square = 0.0
    for old, new in zip(before, now, strict=True):
        change = new - old
        product += float(((_rounded(new, precision) - _rounded(old, precision)) * change).sum())
        square += float(change.square().sum())
    return product / square if square else 0.0


def _rounded(rows: Tensor, precision: str) -> Tensor:
    rows = rows.bfloat16().float()
    return round_rows(rows) if precision == "fp8" else rows
