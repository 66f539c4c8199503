"""Eight-bit floating point (e4m3): the rounding of FP8 rollouts, on any device.

A row is scaled so that its largest magnitude becomes the format's largest number, rounded to e4m3,
and scaled back when it is used: weights by output channel, activations by token.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [..., n] as e4m3, and the float32 scales [..., 1] that undo the scaling."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return (rows / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def round_rows(rows: Tensor) -> Tensor:
    """Return rows after e4m3 rounding, in their own type: FP8 where there is no FP8."""
    quantized, scale = quantize_rows(rows)
    return (quantized.float() * scale).to(rows.dtype)
